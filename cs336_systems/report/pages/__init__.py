"""What each chapter shows: numeric frames and figures from its rows, one module a chapter."""
