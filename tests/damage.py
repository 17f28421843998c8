"""Wrong values put into the parts of a JSON file, by their place."""

DROP = object()


def damage(parts, place, value):
    """Sets what stands at a place such as `streams.0.kinds`; a function makes it of what was there, DROP deletes it."""
    *way, last = (int(key) if key.isdigit() else key for key in place.split("."))
    for key in way:
        parts = parts[key]
    if value is DROP:
        del parts[last]
    else:
        parts[last] = value(parts[last]) if callable(value) else value
