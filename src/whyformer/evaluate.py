"""Where the metrics were; ``whyformer.evaluate`` is the function alone."""

raise ImportError("the modules of whyformer.evaluate have moved to whyformer.evaluation; whyformer.evaluate(...) stays")
