"""Views of a run: data (`run`, `curves`, `facts`), charts (`chart`, `timeline`), HTML report and model card."""
