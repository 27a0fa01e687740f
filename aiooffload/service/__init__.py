"""The worker: a module of kernels and coroutines as a long-lived HTTP service.

Two kinds of processes. The *front* owns the socket and never imports the program::

    connections -> http -> dispatch (admission, batching) -> supervisor ==socket==> device process

One *device process* per device runs the program's handlers with an Offload. A lost device costs that process
alone, and the front answers what was in flight there with 503 and starts another.

=============== ============================================================================
``app``         what a program declares: endpoints, host functions, start and stop
``tensors``     data types and shapes, and tensors as bytes
``protocol``    the Open Inference Protocol v2: requests and responses as bytes (pure)
``batching``    which requests share one call of a handler, and when (pure)
``frames``      what front and device process say to each other, as bytes (pure)
``dispatch``    the queue: who may enter, what goes to which device, deadlines
``process``     one life of a device process, as the front sees it
``supervisor``  replaces device processes
``device``      the device process
``http``        the routes, on Starlette
``infer``       the one that matters: inference, as a response or as a stream
``connections`` what one client may take of the server, on uvicorn
``metrics``     what ``/metrics`` tells
``logs``        structlog's set-up, and lines that never block the loop
``config``      flags, environment and file
``worker``      all of the front together, from start to exit
``cli``         the commands
``once``        one request without a server
``doctor``      what the machine has, what it lacks, and what to do about it
``versions``    of packages
``collector``   how often the garbage collector looks, and at what
=============== ============================================================================
"""
