"""The only place that changes a model: everything that can fail is prepared before anything is changed."""
