"""Sandboxed Python for tools: a warm CPython zygote whose children run under seccomp."""
