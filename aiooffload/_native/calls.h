/* What handler.c, request.c and channel.c share: a channel's host end. */
#ifndef AIOOFFLOAD_CALLS_H
#define AIOOFFLOAD_CALLS_H

#include "native.h"
#include "../device/aiooffload_wire.h"

/* ---- handler.c: launches that call, and the functions they call ---- */

typedef struct {
    PyObject_HEAD
    PyObject *context;        /* contextvars.Context that its handlers start from */
    PyObject *operation;
    PyObject *requests;       /* set of its requests whose handlers have not ended */
    Py_ssize_t active;        /* how often it occurs in open requests */
    char stopped;             /* it was asked to stop: nothing of it is served any more */
    char told;                /* some wait of it was answered CANCELLED */
    char ended;               /* the kernel is over and everything it sent was read */
} AoCaller;

struct AoRequest;

typedef struct {
    PyObject_HEAD
    PyObject *callable;       /* the coroutine function */
    PyObject *context;        /* what a batch starts from: the context it was registered in */
    PyObject *formats;        /* bytes, a letter of the struct module per argument; decoded here if plain */
    PyObject *read, *dtype;   /* a batch's rows are read(request, dtype): an array, with a field per argument if there are several */
    unsigned nbytes;          /* of one row of arguments */
    unsigned reply_nbytes;    /* of one result; 0: none */
    unsigned char reply_kind;
    char reply_format;        /* a letter, or 0: the owner encodes */
    char plain, batch;
    struct AoRequest *collecting; /* the batch that a drain is filling, or NULL */
} AoHandler;

/* Calls a plain handler with the arguments at `data`; a new coroutine. */
PyObject *ao_handler_call(const AoHandler *handler, const unsigned char *data);
/* Calls a batch handler with its rows; a new coroutine. */
PyObject *ao_handler_call_batch(const AoHandler *handler, struct AoRequest *request);
/* Encodes a Python number for which no more than a look is needed; 0: the owner does it. */
int ao_handler_encode(const AoHandler *handler, PyObject *value, unsigned char out[8]);
/* Whether a buffer is what a batch of so many rows gives. */
int ao_handler_gives(const AoHandler *handler, const Py_buffer *view, uint32_t rows);

/* ---- request.c: one request or a batch of them, from its first step to the reply ---- */

typedef struct {
    uint64_t ticket;
    AoCaller *caller;           /* strong in the first entry of a run of the same, borrowed in the rest */
    uint32_t cell;            /* AO_NO_CELL: a post */
    uint16_t rows;
    char open;                /* not answered yet */
} AoEntry;

typedef struct AoRequest {
    PyObject_HEAD
    struct AoChannel *channel;       /* strong */
    AoHandler *handler;         /* strong */
    PyObject *coroutine;      /* its handler's, until that is done */
    PyObject *task;           /* while its handler runs and has suspended */
    PyObject *outcome;        /* what the first step has returned or raised, until it is dealt with */
    PyObject *data;           /* bytearray of rows * handler->nbytes bytes of arguments, or NULL if they were decoded at once */
    AoEntry first, *entries;    /* entries is &first until there is a second one */
    uint32_t count, capacity; /* of entries */
    uint32_t rows, row_capacity; /* data has room for row_capacity of them until the request is sealed */
    int64_t began_ns;         /* when its handler started; 0 if nobody was to be told */
    char running;             /* its handler takes its first step */
    char stepping;            /* its handler's coroutine runs */
    char ending;              /* its handler has ended, and its task has not */
    char listed;              /* its launches have it among their requests */
    char raised;              /* whether outcome was raised */
    char failed;              /* its handler raised */
    char finished;
} AoRequest;

AoRequest *ao_request_make(struct AoChannel *channel, AoHandler *handler);
/* Adds an entry with its rows, whose arguments are at `data` unless that is NULL. -1 with an exception. */
int ao_request_add(AoRequest *request, AoCaller *caller, uint64_t ticket, unsigned cell, unsigned rows, const unsigned char *data);
/* No more entries: from here on others may see its data. -1 with an exception. */
int ao_request_seal(AoRequest *request);
/* It is over: its launches may be waiting for that. Keeps the current exception; -1 with one of its own. */
int ao_request_close(AoRequest *request);
/* Runs its handler's first step. Steals `coroutine`, which may be NULL with the handler's exception set. */
int ao_request_start(AoRequest *request, PyObject *coroutine);
/* Answers CANCELLED to those of its launches that were stopped; returns whether another one still wants an answer. */
int ao_request_drop(AoRequest *request);
/* The current exception is its handler's. */
int ao_request_fail(AoRequest *request);
/* Answers one entry with `rows` results of `nbytes` each at `data`, or with a code. */
void ao_answer(struct AoChannel *channel, AoEntry *entry, uint64_t status, uint64_t kind, const unsigned char *data,
               size_t nbytes, int64_t code);
int ao_request_prepare(void); /* once, before the first request */

/* ---- channel.c: the ring ---- */

typedef struct AoChannel {
    PyObject_HEAD
    unsigned char *shared;    /* valid as long as memory lives */
    PyObject *memory;
    PyObject *loop, *owner;   /* owner: begin, failed, encode, idle, refused */
    PyObject *context;        /* the one it was made in, for what is none of a handler's affair */
    PyObject *handlers;       /* dict: id -> Handler */
    AoCaller *callers[AO_LAUNCHES]; /* strong; by launch index, NULL: no such launch */
    uint64_t position;        /* tickets read */
    uint64_t posts, published; /* posts read, and as told to the device */
    uint64_t dropped;         /* descriptors that made no sense */
    uint32_t awaited[AO_CELLS / 32]; /* bitmap: cells of requests that were accepted and not answered yet */
    unsigned last_id;         /* the function looked up last, */
    AoHandler *last;            /* strong, or NULL: handlers are never taken back */
    int64_t served_ns;        /* when something was last read, */
    int64_t gap_ns;           /* and how long before that there was silence, the last time that says something */
    int unsettled;            /* launches that have ended with something unread; the owner's, for who looks */
    PyObject *on_served;      /* told (request, began_ns, failed) of each handler that ended; NULL: nobody is */
    Py_ssize_t together;      /* requests that the last drain found, if it filled a batch */
    uint64_t suspended;       /* handlers, ever, that were not done with their first step */
    char busy;                /* a drain is running: what it calls may ask for another */
    char closed;
} AoChannel;

#endif
