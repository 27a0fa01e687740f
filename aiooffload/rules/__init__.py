"""Decisions, as plain functions and objects: events go in, decisions come out.

Nothing here knows asyncio, threads, CUDA or a driver, so that property tests can try a rule by
the million. The engine does the I/O around them.
"""
