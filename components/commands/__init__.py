"""Commands: training (start), its check and dry run, text from a model, the page of curves."""
