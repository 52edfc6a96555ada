"""The scores of an explanation as a table, a row for each token, patch or pixel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from whyformer.errors import MissingExtra

if TYPE_CHECKING:
    import pandas

    from whyformer.explanation.result import Explanation


def to_pandas(e: Explanation) -> pandas.DataFrame:
    """One row for each score, see :meth:`whyformer.Explanation.to_pandas`."""
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra('to_pandas needs the package pandas: pip install "whyformer[data]"') from error
    parts = [e.part(name) for name in e.inputs]
    tables = [pandas.DataFrame(_columns(part[i], i)) for i in range(len(e)) for part in parts]
    made = pandas.concat(tables, ignore_index=True)
    return made if e.parts else made.drop(columns="input")


def _columns(e: Explanation, sample: int) -> dict[str, Any]:
    """Names of columns -> values, of one sample of one input."""
    scores = e.scores[0].float().numpy()
    count = scores.size
    name = e.target_names[0] if e.target_names is not None else e.label(int(e.target[0]))
    made: dict[str, Any] = {"sample": np.full(count, sample), "input": e.input or "", "method": e.method}
    made["target"] = name
    if e.level == "token":
        made["position"] = np.arange(count)
        if e.tokens is not None:
            special = set() if e.special is None else set(e.special[0])
            made |= {"token": e.tokens[0], "special": [i in special for i in range(count)]}
    elif e.level == "pixel" or e.grid is not None:
        steps = () if e.frames is None else (e.frames,)
        shape = scores.shape if e.level == "pixel" else (*steps, *(e.grid or ()))
        names = ("frame", "row", "column")[-len(shape) :]
        made |= dict(zip(names, np.indices(shape).reshape(len(shape), -1), strict=True))
    else:
        made["position"] = np.arange(count)
    return {**made, "score": scores.reshape(-1)}
