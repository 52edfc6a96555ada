"""How the command starts and ends without what it does not need, in its own process only: the library never does this.

Nothing here changes a figure. Half of what a short command costs is Python looking for garbage while 2,800 modules are
imported, and taking them apart one by one at the end; then come parts of torch and transformers for training, compiling
and several machines. They are put off until something asks for them (torch._dynamo, sympy), or counted as absent where
nothing that a command does can use them (scipy in training losses, torch.distributed), and what is only looked up or
written for readers of their code is left. Modules of models are imported in the ordinary way, with all that is
installed. Where transformers is built differently than expected, all of it is.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import operator
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from types import FunctionType, ModuleType
from typing import Any

_ABSENT = ("is_scipy_available", "is_torch_distributed_available")
_kept: list[Any] = []  # what is registered lasts as long as this
_ending: dict[str, Any] = {"own": False, "quick": False, "status": None}


def own_process(command: Callable[[], None]) -> None:
    """Run the command line as all that this process is for."""
    _ending["own"] = True
    gc.disable()  # until `ready`
    sys.meta_path.insert(0, _Once("torch._library.utils", _find_places_at_once))
    sys.meta_path.insert(0, _Once("matplotlib.artist", _describe_nothing))
    atexit.register(_leave)  # the first to be registered is called last, after all threads and other handlers
    try:
        command()
    except SystemExit as end:
        _ending["status"] = end.code or 0
        raise


def ready(quick: bool = False) -> None:
    """What a command needs is imported, or soon will be: from here on garbage is collected again.

    ``quick``: it is about to load its one model and will be done soon: import transformers lightly, and end at once.
    """
    if _ending["own"] and not gc.isenabled():
        if quick:
            _ending["quick"] = True
            import_lightly()
        gc.freeze()
        gc.enable()


def _leave() -> None:
    """End without taking every module apart (a second of processor time); a stream that fails is left to Python."""
    if _ending["quick"] and isinstance(_ending["status"], int):
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_ending["status"])


def import_lightly() -> None:
    """Import transformers' base of all models without what only training, compiling and clusters need."""
    before = set(sys.modules)
    try:
        import torch

        with _Sooner():
            import transformers.utils

            if "transformers.modeling_utils" in sys.modules:
                return
            with _absent(transformers.utils):
                for name, later in (("torch._dynamo", _Compiler), ("torch.fx.experimental.symbolic_shapes", _Shapes)):
                    if name not in sys.modules:
                        later.put_off(name)
                importlib.import_module("transformers.masking_utils")
                importlib.import_module("transformers.modeling_utils")
        # weights that are drawn before the model's own are loaded have no data; torch would ask sympy for their type
        _kept.append(torch.library.Library("aten", "IMPL", "Meta"))
        _kept[0].impl("normal_", lambda drawn, *_, **__: drawn, allow_override=True)
    except Exception:  # another release of either: forget what was begun, and `load` imports it as always
        for name in set(sys.modules) - before:
            if isinstance(sys.modules[name], _Later):
                parent, _, leaf = name.rpartition(".")
                vars(sys.modules[parent]).pop(leaf, None)
            elif name.partition(".")[0] != "transformers":
                continue
            del sys.modules[name]


@contextlib.contextmanager
def _absent(utils: ModuleType) -> Iterator[None]:
    """While this lasts, who asks transformers for :data:`_ABSENT` packages is told, for good, that they are absent."""
    places = [(place, name) for place in (utils, utils.import_utils) for name in _ABSENT if hasattr(place, name)]
    found = [getattr(*one) for one in places]
    for place, name in places:
        setattr(place, name, lambda: False)
    try:
        yield
    finally:
        for (place, name), one in zip(places, found, strict=True):
            setattr(place, name, one)


class _Once:
    """A module is changed as soon as it is imported."""

    def __init__(self, name: str, change: Callable[[dict[str, Any]], None]) -> None:
        self.name, self.change = name, change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        spec = PathFinder.find_spec(name, path, target) if name == self.name else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.change(vars(module))

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Sooner(_Once):
    """While transformers is imported: it looks for names in all its files, thrice, line by line. It is given each file
    from the line that counts, and what it has found in a folder is kept."""

    def __init__(self) -> None:
        super().__init__("transformers.utils.import_utils", self.hasten)
        self.changed: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)
        for own, original in self.changed:
            own.update(original)

    def hasten(self, own: dict[str, Any]) -> None:
        fetch, create = own["fetch__all__"], own["create_import_structure_from_path"]
        self.changed.append((own, {"fetch__all__": fetch, "create_import_structure_from_path": create}))
        own["fetch__all__"] = lambda content: fetch(content[content.rfind("\n__all__") + 1 :])
        own["create_import_structure_from_path"] = functools.cache(create.__wrapped__)


def _find_places_at_once(own: dict[str, Any]) -> None:
    """torch notes the file and the line of each operation that it registers, and looks through all modules for them."""
    own["get_source"] = _place


def _place(above: int) -> str:
    frame = sys._getframe(above)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _describe_nothing(own: dict[str, Any]) -> None:
    """matplotlib writes the documentation of 60 classes while it is imported, longer than it draws a picture."""
    own["kwdoc"] = lambda artist: ""
    own["Artist"]._update_set_signature_and_docstring = classmethod(lambda artist: None)


class _Later(ModuleType):
    """A module of torch until something in it is needed that cannot be said without it."""

    @classmethod
    def put_off(cls, name: str) -> None:
        spec, (parent, _, leaf) = find_spec(name), name.rpartition(".")
        assert spec is not None
        module = module_from_spec(spec)
        module.__class__ = cls
        sys.modules[name] = module
        setattr(sys.modules[parent], leaf, module)
        module.begin()

    def begin(self) -> None:
        """What has to be there from the first."""

    def light(self, name: str) -> Any:
        """What stands for this name until the module is there; None: it has to be there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and (name != "__path__" or "_path" not in self.__dict__):
            raise AttributeError(name)
        found = self.light(name)
        return getattr(_executed(self), name) if found is None else found


class _Shapes(_Later):
    """torch.fx.experimental.symbolic_shapes, which needs sympy. Every gradient and most tensors without data ask it
    something; where all sizes are plain numbers the answer is plain, too."""

    def light(self, name: str) -> Any:
        said = _SAID.get(name)

        def answer(*given: Any) -> Any:  # who keeps it may ask again when the module is there
            return said(*given) if said and _plain(given) else getattr(_executed(self), name)(*given)

        return said and answer


_SAID: dict[str, Callable[..., Any]] = {
    "sym_eq": operator.eq,
    "is_nested_int": lambda size: False,
    **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious"), lambda truth: truth),
}


def _plain(given: Any) -> bool:
    return all(map(_plain, given)) if isinstance(given, tuple) else type(given) in (int, bool)


class _Compiler(_Later):
    """torch._dynamo. Importing transformers needs one of its parts, and three marks; they are taken down, and made when
    the compiler is there."""

    def begin(self) -> None:
        importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op")
        # so that to import any other part asks for the path, and comes after the whole, as it has to
        self.__dict__.update(_marks=[], _path=self.__dict__.pop("__path__"))

    def light(self, name: str) -> Any:
        if name == "disable":
            return functools.partial(_disabled, self)
        if name in ("allow_in_graph", "assume_constant_result"):
            return lambda function: self.__dict__["_marks"].append((name, function)) or function
        return None


def _executed(module: ModuleType) -> Any:
    """The module as it is without :class:`_Later`."""
    if isinstance(module, _Later):
        module.__class__ = ModuleType  # type: ignore[assignment]
        if "_path" in module.__dict__:
            module.__path__ = module.__dict__.pop("_path")
        module.__spec__.loader.exec_module(module)  # type: ignore[union-attr]
        for mark, function in module.__dict__.pop("_marks", ()):
            getattr(module, mark)(function)
    return module


def _disabled(dynamo: ModuleType, function: Any = None, *args: Any, **options: Any) -> Any:
    """``torch._dynamo.disable``, which says nothing until there is a compiler."""
    if function is None:
        return lambda given: _disabled(dynamo, given, *args, **options)
    if not isinstance(function, FunctionType):
        return _executed(dynamo).disable(function, *args, **options)

    @functools.wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        there = not isinstance(dynamo, _Later)
        return (dynamo.disable(function, *args, **options) if there else function)(*given, **named)

    return called
