"""The C++ source of the `cpu` backend, its build, and the shared object that the build leaves here."""
