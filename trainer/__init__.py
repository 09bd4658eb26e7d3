"""The trainer: one base model, many sessions, one operation at a time. It knows the log, never the web."""
