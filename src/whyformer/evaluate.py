"""Former place of the metrics; ``whyformer.evaluate`` is now the function only."""

raise ImportError("the modules of whyformer.evaluate moved to whyformer.evaluation; whyformer.evaluate(...) remains")
