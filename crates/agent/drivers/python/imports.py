# Imports that are adapted.


def adapted_spec(name, path, target):
    """The spec the other finders find, its loader made to call one of ADAPT after the module's own code."""
    finders = [finder for finder in sys.meta_path if finder is not Hook]
    spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
    if spec is not None and not isinstance(spec.loader, type):
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            ADAPT[name](module)

        spec.loader.exec_module = exec_module
    return spec


def keep_lines(linecache):
    """Gives linecache the code of all calls; user code may have emptied it."""
    call.linecache = linecache
    for name in SOURCES:
        if name not in linecache.cache:
            linecache.cache[name] = line_entry(name)


def adopt_pyplot(pyplot):
    call.pyplot = pyplot
    pyplot.show = show_figures
    pyplot.Figure.show = lambda figure, warn=True: show(figure, b"display")


def adopt_ipython(module):
    module.display = display


ADAPT = {
    "linecache": keep_lines,
    "matplotlib.pyplot": adopt_pyplot,
    "IPython.core.display_functions": adopt_ipython,
}
