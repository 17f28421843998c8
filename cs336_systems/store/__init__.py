"""What is kept of a measurement: `rows`, by what code (`code`) on which `machine`; `measuring` fills them."""
