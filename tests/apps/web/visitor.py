"""A simulated visitor of the page: handlers, a session, and inputs as the page sends them."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from whyformer.apps.web.handlers import Handlers
from whyformer.apps.web.visitor_session import VisitorSession
from whyformer.show.look import OPACITY

PICTURES = Path(__file__).parents[3] / "examples" / "pictures"
SENTENCE = "An utterly charming film, though it drags."


@dataclass
class Visitor:
    handlers: Handlers
    session: VisitorSession = field(default_factory=VisitorSession)

    def entered(self, input_="", *, methods=("transformer_attribution",), classes=(), settings=None, model=None, truncate=False, checkpoint=False, style="colours", opacity=OPACITY, keep=0.2, kind=None, picture=None, length=16, chat=False, pair="", target=""):
        """The values of the page's controls for a picture of that file name, or for a sentence."""
        kind = kind or ("image" if input_.endswith(".png") else "text")
        name = input_ if kind == "image" else picture
        picture = None
        if name:
            path = self.handlers.uploads / name
            path.write_bytes((PICTURES / name).read_bytes())
            picture = {"path": str(path), "meta": {"_type": "gradio.FileData"}}
        model = model or {"image": "bundled:digits", "text": "bundled:sst2", "answer": "bundled:reader"}[kind]
        return {
            "kind": kind, "picture": picture, "sentence": input_ if kind != "image" else "", "pair": pair, "model": model, "methods": list(methods),
            "classes": [str(c) for c in classes], "target": target, "truncate": truncate, "checkpoint": checkpoint, "style": style, "opacity": opacity, "keep": keep,
            "length": length, "chat": chat, "number": self.session.number, "settings": json.dumps(settings or {}),
        }  # fmt: skip

    def explain(self, *args, **kwargs):
        """The last value of each part of the page after a click on Explain."""
        outputs = {}
        for step in self.handlers.explain(self.session, self.entered(*args, **kwargs)):
            outputs |= step
        return outputs
