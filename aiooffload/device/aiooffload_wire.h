/* The wire layout of a channel: what a kernel and the host have to agree on, in plain C.
 *
 * Included by aiooffload.cuh, by the C extension and, as text, by the test that holds it against
 * aiooffload/rules/wire.py. A change of any line raises AO_WIRE_VERSION.
 *
 * Two blocks of memory make a channel. The *shared block* is registered host memory:
 *
 *     tail      how many posts the host has read, so that a device knows when there is room
 *     abort     the message of the launch that gave up
 *     launches  one block per launch: its cancel word, and what it tells the host on the side
 *     ring      request descriptors, 16 bytes each, written by one vector store
 *     cells     reply cells: a word for the value, a word that says whose it is, room for more
 *     payloads  one area per ring slot, for arguments of more than 8 bytes
 *
 * The *state block* is device memory, zeroed: everything that devices modify atomically. No device
 * ever modifies host memory atomically; PCIe has no such operation in general.
 *
 * A call holds a reply cell, and there are AO_CELLS; posts reserve one of AO_POSTS places. The ring
 * has a slot for each of both, so that whoever has taken a ticket always finds its slot free and
 * never has to wait between taking a ticket and publishing it.
 */
#ifndef AIOOFFLOAD_WIRE_H
#define AIOOFFLOAD_WIRE_H

#define AO_WIRE_VERSION 2

#define AO_CELLS 16384
#define AO_POSTS 16384
#define AO_RING_SLOTS 32768 /* AO_CELLS + AO_POSTS, a power of two */
#define AO_LAUNCHES 1024
#define AO_PAYLOAD_NBYTES 256
#define AO_INLINE_NBYTES 8

/* Descriptor: {argument, control}, 16 bytes, at RING + 16 * (ticket % AO_RING_SLOTS).
 * argument: up to 8 bytes of arguments, or nbytes | rows << 16 of those in the slot's payload.
 * control: function | launch | cell | form | tag, from the lowest bit; the tag, lap + 1, makes it valid. */
#define AO_FUNCTION_BITS 25
#define AO_LAUNCH_BITS 10
#define AO_CELL_BITS 15
#define AO_FORM_BITS 4
#define AO_TAG_BITS 10
#define AO_LAUNCH_SHIFT 25
#define AO_CELL_SHIFT 35
#define AO_FORM_SHIFT 50
#define AO_TAG_SHIFT 54
#define AO_NO_CELL 32767  /* a post */
#define AO_FORM_PAYLOAD 9 /* 0..8: so many bytes in `argument`; 9: in the payload; 10: rows of them */
#define AO_FORM_ROWS 10

/* Reply cell: {value, control}, then AO_PAYLOAD_NBYTES of room.
 * control: nbytes | kind << 10 | status << 13 | (ticket + 1) << 16.
 * value: the result if it has up to 8 bytes, the code if the status is ERROR. */
#define AO_CELL_STRIDE 320
#define AO_CELL_DATA 64
#define AO_REPLY_KIND_SHIFT 10
#define AO_REPLY_STATUS_SHIFT 13
#define AO_REPLY_TICKET_SHIFT 16

#define AO_STATUS_OK 0
#define AO_STATUS_ERROR 1
#define AO_STATUS_CANCELLED 2
#define AO_STATUS_TIMEOUT 3

#define AO_KIND_NONE 0
#define AO_KIND_BOOL 1
#define AO_KIND_INT 2
#define AO_KIND_UINT 3
#define AO_KIND_FLOAT 4
#define AO_KIND_COMPLEX 5
#define AO_KIND_STRUCT 6

/* Codes of ERROR. A handler's own codes are positive. */
#define AO_CODE_RAISED -1
#define AO_CODE_UNKNOWN_FUNCTION -2
#define AO_CODE_TOO_LARGE -3
#define AO_CODE_WRONG_ARGUMENTS -4
#define AO_CODE_WRONG_REPLY -5
#define AO_CODE_NO_ANSWER -6

/* A mapped argument among the others: {address, nbytes | kind << 56}. */
#define AO_MAP_SHIFT 56
#define AO_MAP_ALLOC 0
#define AO_MAP_TO 1
#define AO_MAP_FROM 2
#define AO_MAP_TOFROM 3

/* The shared block. */
#define AO_TAIL_OFFSET 0
#define AO_ABORT_OFFSET 128    /* {launch + 1, code, length}, 8 bytes each, then the text */
#define AO_ABORT_TEXT 24
#define AO_ABORT_NBYTES 384
#define AO_LAUNCHES_OFFSET 4096
#define AO_RING_OFFSET 69632
#define AO_CELLS_OFFSET 593920
#define AO_PAYLOADS_OFFSET 5836800
#define AO_SHARED_NBYTES 14225408

/* One launch of the shared block, 64 bytes. */
#define AO_LAUNCH_STRIDE 64
#define AO_LAUNCH_CANCEL 0    /* host: 1 to cancel */
#define AO_LAUNCH_SEEN 8      /* device: 1 once it has seen that */
#define AO_LAUNCH_TROUBLE 16  /* device: function + 1 | -code << 32 of a call that went wrong unknown to the host */
#define AO_LAUNCH_GIVEN_UP 24 /* the same of a call that got no answer in time */
#define AO_LAUNCH_PROGRESS 32 /* device: {done, total}, one store */
#define AO_LAUNCH_END 48      /* the head when the launch had ended */

/* The state block. */
#define AO_STATE_HEAD 0          /* tickets given out */
#define AO_STATE_POSTS 128       /* places for posts reserved */
#define AO_STATE_TAIL 256        /* the tail as it was read last */
#define AO_STATE_REFRESH 384     /* when the tail may be read again, on the device's clock */
#define AO_STATE_RUNG 448        /* when the bell was rung last by a waiting call, on the device's clock */
#define AO_STATE_ABORT 512       /* 1 once a launch writes its message */
#define AO_STATE_TAKEN 1024      /* bitmap of the cells in use */
#define AO_STATE_LEFT 3072       /* bitmap of the cells in use whose caller has left */
#define AO_STATE_TICKETS 5120    /* per cell: the ticket whose reply frees it, while its bit in LEFT is set */
#define AO_STATE_NBYTES 136192

/* ao::Launch, a kernel's first parameter: {shared, state, bell, timeout_ns, launch | version << 32, 0, 0, 0}. */
#define AO_PARAMETER_NBYTES 64

#endif
