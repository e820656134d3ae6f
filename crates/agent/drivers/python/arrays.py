# Arrays and tables of the libraries that everybody uses, where they are loaded.


def known_classes():
    """numpy.ndarray, pandas.DataFrame and Series, torch.Tensor, or None for what is not there."""
    try:
        loaded = [item(sys.modules, name) for name in ("numpy", "pandas", "torch")] if type(sys.modules) is dict else [None] * 3
        numpy, pandas, torch = (vars(it) if type(it) is MODULE else {} for it in loaded)
        return item(numpy, "ndarray"), item(pandas, "DataFrame"), item(pandas, "Series"), item(torch, "Tensor")
    except Exception:
        return None, None, None, None


def item(mapping, wanted):
    for name, value in mapping.items():
        if type(name) is str and name == wanted:
            return value


def field(value, name):
    """What C code keeps in an object under that name, or None."""
    for base in MRO_OF(type(value)):
        found = item(DICT_OF(base), name)
        if found is not None:
            kind = type(found)
            return kind.__get__(found, value) if kind is KEPT_BY_C[0] or kind is KEPT_BY_C[1] else None


def measured(label, value, classes):
    array, frame, series, tensor = classes
    kind, entries = type(value), []
    if kind is frame or kind is series:
        # A table's axes: the manager's, which C keeps for some and the object itself for others. pandas moved them more than once.
        manager = item(field(value, "__dict__"), "_mgr")
        axes = field(manager, "axes")
        if axes is None:
            axes = item(field(manager, "__dict__") or {}, "axes")
        shape = [length(axis, array) for axis in (axes if type(axes) is list else ())][::-1]
    else:
        shape = sizes(field(value, "shape"))
        if kind is array:
            dtype, nbytes = field(value, "dtype"), field(value, "nbytes")
            code, width = field(dtype, "kind"), field(dtype, "itemsize")
            if type(code) is str and type(width) is int:
                label += " %s%d" % (code[:1], width)
            if type(nbytes) is int:
                entries.append('"size":%d' % nbytes)
    if shape and None not in shape:
        entries.append('"shape":"%s"' % "x".join(map(str, shape))[:CLIP])
    return label, entries


def sizes(shape):
    """A tuple of numbers, or of a subclass that C made (torch.Size)."""
    if not any(base is tuple for base in MRO_OF(type(shape))):
        return None
    numbers = list(tuple.__iter__(shape))
    return numbers if all(type(it) is int for it in numbers) else None


def length(axis, array):
    """Of an index: a range, or what an array has."""
    kept = field(axis, "__dict__")
    data, numbers = item(kept, "_data"), item(kept, "_range")
    if type(numbers) is range:
        return len(numbers)
    if type(data) is not array:  # texts, since pandas 3, are in an array that C keeps in another
        data = field(data, "_ndarray")
    return sizes(field(data, "shape"))[0] if type(data) is array else None
