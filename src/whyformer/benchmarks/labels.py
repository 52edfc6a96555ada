"""Labels of the data against the classes of the model."""

from __future__ import annotations

from dataclasses import replace

from whyformer.benchmarks.study import Study
from whyformer.errors import InputError
from whyformer.models.structure import class_count, class_names


def check_labels(study: Study) -> None:
    """Every sample must have a label among the model's classes; names bring those of texts into the model's order."""
    missing = sum(s.label is None for s in study.samples)
    if missing:
        raise InputError(
            f"{missing} of {len(study.samples)} samples have no label in the model's classes, which this benchmark "
            "needs. Give labelled data; segmentation data whose classes are not the model's can only be used with the "
            "predicted class"
        )
    classes = class_count(study.model)
    if study.labels and not _ordered_by_name(study) and classes is not None and classes != len(study.labels):
        raise InputError(
            f"the data have {len(study.labels)} classes ({', '.join(study.labels)}) and the model {classes}: label "
            f"sets do not match"
        )
    worst = max(s.label or 0 for s in study.samples)
    if classes is not None and worst >= classes:
        raise InputError(
            f"the data hold class {worst} and the model has {classes} classes (0 to {classes - 1}): label sets "
            f"do not match"
        )


def _ordered_by_name(study: Study) -> bool:
    """Bring the labels into the order of the model's classes, if the names (or their first three letters) tell it."""
    names, _ = class_names(study.model)
    wanted = [label.casefold() for label in study.labels]
    if not names or len(names) != len(wanted):
        return False
    known = {name.casefold(): index for index, name in names.items()}
    short = {name[:3]: index for name, index in known.items()}
    in_order = list(range(len(wanted)))
    for order in ([known.get(w, known.get(w[:3])) for w in wanted], [short.get(w[:3]) for w in wanted]):
        if sorted(-1 if i is None else i for i in order) == in_order:
            if order != in_order:
                study.samples = [replace(s, label=order[s.label or 0]) for s in study.samples]
                study.remarks.append(f"labels were put into the model's order by name: {', '.join(names.values())}")
            return True
    study.remarks.append(
        f"the model calls its classes {', '.join(names.values())}, the data {', '.join(study.labels)}: taken to be in "
        f"the same order"
    )
    return False
