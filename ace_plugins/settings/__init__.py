"""All settings with their ranges, and their sources: presets, a file, the environment, options."""
