"""What a person looks at: a run as facts (`run`, `curves`), as pictures (`chart`, `timeline`), as a page, as a card."""
