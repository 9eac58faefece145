"""The only place that changes a model: prepare what can fail, then change what cannot."""
