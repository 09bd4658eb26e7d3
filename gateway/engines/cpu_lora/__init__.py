"""The patches of the CPU plugin. Imported only inside an engine process, after the version guard."""
