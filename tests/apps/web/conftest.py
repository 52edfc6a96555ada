"""Models, handlers and a visitor for the tests of the page."""

import pytest

pytest.importorskip("gradio", reason="needs whyformer[app]")

from apps.web.visitor import Visitor
from whyformer.apps.web.handlers import Handlers
from whyformer.apps.web.limits import Catalogue, PageLimits


@pytest.fixture(scope="session")
def catalogue():
    return Catalogue()


@pytest.fixture
def handlers(catalogue, tmp_path):
    folder = tmp_path / "uploads"
    folder.mkdir()
    return Handlers(catalogue, PageLimits(), folder)


@pytest.fixture
def visitor(handlers):
    return Visitor(handlers)
