"""What each chapter shows: one module for a chapter, of its name; tables and figures here, sentences in `_words`."""
