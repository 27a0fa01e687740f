"""What runs one device under one event loop: the I/O around the rules.

``engine.py`` puts the parts together, opens and closes them. ``lanes.py`` is the way to the
device: which lane, in which order, how much at a time. ``completion.py`` is the way back: slots,
spinning, timer, monitor. ``launches.py``, ``transfers.py``, ``copies.py`` and ``memory.py`` are what
can be submitted, ``visits.py`` is where two engines meet. ``health.py`` notices a lost device,
``maintenance.py`` runs the driver calls that wait.
"""
