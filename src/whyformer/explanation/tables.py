"""The scores of an explanation as a pandas table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from whyformer.errors import import_optional

if TYPE_CHECKING:
    import pandas

    from whyformer.explanation.result import Explanation


def to_pandas(e: Explanation) -> pandas.DataFrame:
    """Return a row for each score; see :meth:`whyformer.Explanation.to_pandas`."""
    pd = import_optional("pandas", "to_pandas", "data")
    parts = [e.part(name) for name in e.inputs]
    tables = [pd.DataFrame(_columns(part[i], i)) for i in range(len(e)) for part in parts]
    table: pandas.DataFrame = pd.concat(tables, ignore_index=True)
    return table if e.parts else table.drop(columns="input")


def _columns(e: Explanation, sample: int) -> dict[str, Any]:
    """Return the columns by name for one input of one sample."""
    scores = e.scores[0].float().numpy()
    count = scores.size
    name = e.target_names[0] if e.target_names is not None else e.label(int(e.target[0]))
    columns: dict[str, Any] = {"sample": np.full(count, sample), "input": e.input or "", "method": e.method}
    columns["target"] = name
    if e.level == "token":
        columns["position"] = np.arange(count)
        if e.tokens is not None:
            special = set() if e.special is None else set(e.special[0])
            columns |= {"token": e.tokens[0], "special": [i in special for i in range(count)]}
    elif e.level == "pixel" or e.grid is not None:
        steps = () if e.frames is None else (e.frames,)
        shape = scores.shape if e.level == "pixel" else (*steps, *(e.grid or ()))
        names = ("frame", "row", "column")[-len(shape) :]
        columns |= dict(zip(names, np.indices(shape).reshape(len(shape), -1), strict=True))
    else:
        columns["position"] = np.arange(count)
    return {**columns, "score": scores.reshape(-1)}
