"""Measuring: the machine (`machine`), times (`timing`), what is kept (`rows`), and of which code (`code`)."""
