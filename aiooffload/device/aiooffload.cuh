// Calls from a running kernel to coroutines on the host.
//
//     #include <aiooffload.cuh>
//
//     extern "C" __global__ void kernel(ao::Launch launch, long long* y) {
//         long long out;
//         ao::Status s = launch.call(ao::fn("twice"), out, 21LL);
//         if (s == ao::Status::OK) y[0] = out;
//     }
//
// CUDA C++17, under NVRTC and nvcc, compute capability 7.5 and up. Arguments and results are
// trivially copyable; arguments have up to 256 bytes together, laid out as the members of a
// struct would be, a result up to 256 bytes. Whatever is larger goes as a mapped argument.
//
// Every wait ends: OK, ERROR, CANCELLED or TIMEOUT. A thread that waits sleeps in between, the
// longer the longer it has waited. Calls of one thread are seen by the host in their order;
// nothing is promised between threads. A call publishes what its thread has written before.
//
// Memory model: a request is one 16-byte release store of system scope, a reply one 16-byte
// acquire load (PTX ISA, "Memory Consistency Model"). Host memory is written and read, never
// modified atomically.
#ifndef AIOOFFLOAD_CUH
#define AIOOFFLOAD_CUH

#include "aiooffload_wire.h"

#if defined(AIOOFFLOAD_HOST_WIRE_VERSION) && AIOOFFLOAD_HOST_WIRE_VERSION != AO_WIRE_VERSION
#error "this aiooffload.cuh belongs to another version of aiooffload than the host part"
#endif

namespace ao {

typedef unsigned long long u64;

enum class Status : int {
    OK = AO_STATUS_OK,
    ERROR = AO_STATUS_ERROR,
    CANCELLED = AO_STATUS_CANCELLED,
    TIMEOUT = AO_STATUS_TIMEOUT,
};

/// A host function: by name with fn("name"), or by the number it was registered with.
struct Function {
    unsigned id;
    __host__ __device__ constexpr Function(unsigned number) : id(number) {}
};

/// FNV-1a over the name, folded to 25 bits, with the top bit set: numbers given by hand stay below 2^24.
__host__ __device__ constexpr Function fn(const char* name) {
    unsigned hash = 2166136261u;
    for (; *name; ++name) hash = (hash ^ static_cast<unsigned char>(*name)) * 16777619u;
    return Function(((hash ^ (hash >> 24)) & 0xFFFFFFu) | 0x1000000u);
}

/// In place of a result that is not wanted, or that the host function does not give.
struct None {};

/// A range of device memory that the host function sees as an array. See to, from, tofrom, alloc.
struct Mapped {
    u64 address;
    u64 extent;
};

namespace detail {

template <class T> __device__ inline Mapped map(const T* pointer, u64 count, u64 kind) {
    return Mapped{reinterpret_cast<u64>(pointer), count * sizeof(T) | kind << AO_MAP_SHIFT};
}

// What a reply's kind has to be for a result of type T; structs of the caller's own match any.
template <class T> struct Kind { static constexpr unsigned value = AO_KIND_STRUCT; };
#define AO_KIND_OF(type, kind) template <> struct Kind<type> { static constexpr unsigned value = kind; }
AO_KIND_OF(bool, AO_KIND_BOOL);
AO_KIND_OF(char, AO_KIND_INT);
AO_KIND_OF(signed char, AO_KIND_INT);
AO_KIND_OF(short, AO_KIND_INT);
AO_KIND_OF(int, AO_KIND_INT);
AO_KIND_OF(long, AO_KIND_INT);
AO_KIND_OF(long long, AO_KIND_INT);
AO_KIND_OF(unsigned char, AO_KIND_UINT);
AO_KIND_OF(unsigned short, AO_KIND_UINT);
AO_KIND_OF(unsigned, AO_KIND_UINT);
AO_KIND_OF(unsigned long, AO_KIND_UINT);
AO_KIND_OF(unsigned long long, AO_KIND_UINT);
AO_KIND_OF(float, AO_KIND_FLOAT);
AO_KIND_OF(double, AO_KIND_FLOAT);
#undef AO_KIND_OF

template <class T> struct Size { static constexpr unsigned value = sizeof(T); };
template <> struct Size<None> { static constexpr unsigned value = 0; };

// Arguments as the members of a struct: each at a multiple of its alignment, the whole at the largest one.
__host__ __device__ constexpr unsigned align_up(unsigned offset, unsigned alignment) {
    return (offset + alignment - 1) / alignment * alignment;
}

template <class... A> __host__ __device__ constexpr unsigned packed_nbytes() {
    unsigned offset = 0, largest = 1;
    ((offset = align_up(offset, alignof(A)) + sizeof(A), largest = alignof(A) > largest ? alignof(A) : largest), ...);
    return align_up(offset, largest);
}

template <class A> __device__ inline unsigned pack_one(unsigned char* to, unsigned offset, const A& value) {
    static_assert(__is_trivially_copyable(A), "arguments of a call are trivially copyable");
    offset = align_up(offset, alignof(A));
    memcpy(to + offset, &value, sizeof(A));
    return offset + sizeof(A);
}

template <class... A> __device__ inline void pack(unsigned char* to, const A&... values) {
    unsigned offset = 0;
    ((offset = pack_one(to, offset, values)), ...);
    (void)offset;
}

__device__ inline u64 clock_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
__device__ inline u64 load_acquire(const void* p) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
    return value;
}
__device__ inline u64 load_relaxed(const void* p) {
    u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
    return value;
}
__device__ inline void load_pair_acquire(const void* p, u64& a, u64& b) {
    asm volatile("ld.acquire.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
}
__device__ inline void load_pair(const void* p, u64& a, u64& b) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
}
__device__ inline void store_release(void* p, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
__device__ inline void store_relaxed(void* p, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
__device__ inline void store_pair_release(void* p, u64 a, u64 b) {
    asm volatile("st.release.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(a), "l"(b) : "memory");
}
__device__ inline void store_pair(void* p, u64 a, u64 b) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(a), "l"(b) : "memory");
}

__device__ inline unsigned lane_id() {
    unsigned id;
    asm("mov.u32 %0, %%laneid;" : "=r"(id));
    return id;
}

constexpr unsigned BITMAP_WORDS = AO_CELLS / 32;
constexpr u64 BELL_NS = 6000;         // a hot host has answered by then; otherwise it may sleep
constexpr u64 PATIENT_NS = 20000000;  // a wait looks at its launch's cancel word this often: each look crosses the bus
constexpr u64 REFRESH_NS = 1000;      // the tail is read from the host this often, by one thread at a time
constexpr u64 ABORT_NS = 10000000;
constexpr u64 YOUNG_NS = 16000;       // a reply that comes soon is looked for more often
constexpr unsigned MAX_SLEEP_NS = 32000;
constexpr u64 CROWD_NS = 4000;        // where thousands compete for room, nobody tries at once again

// The clock of one wait. Each sleep is a sixteenth or an eighth of the time waited so far, so that waiting costs the
// waiter that much at most and the bus, which every look at host memory crosses, as little as can be.
struct Wait {
    u64 start, patience;
    __device__ Wait() : start(clock_ns()), patience(PATIENT_NS) {}
    __device__ u64 elapsed() const { return clock_ns() - start; }
    __device__ bool is_impatient(u64 elapsed_ns) {
        if (elapsed_ns < patience) return false;
        patience = elapsed_ns + PATIENT_NS;
        return true;
    }
    __device__ static void sleep(u64 elapsed_ns) {
        u64 ns = elapsed_ns / (elapsed_ns < YOUNG_NS ? 16 : 8);
        __nanosleep(ns < 40 ? 40 : ns > MAX_SLEEP_NS ? MAX_SLEEP_NS : static_cast<unsigned>(ns));
    }
};

}  // namespace detail

/// Mapped arguments: `count` elements at `pointer`, in device memory. to: the host gets the content.
template <class T> __device__ inline Mapped to(const T* pointer, u64 count) { return detail::map(pointer, count, AO_MAP_TO); }
/// from: what the host function leaves in the array is copied back before the reply.
template <class T> __device__ inline Mapped from(T* pointer, u64 count) { return detail::map(pointer, count, AO_MAP_FROM); }
/// tofrom: both.
template <class T> __device__ inline Mapped tofrom(T* pointer, u64 count) { return detail::map(pointer, count, AO_MAP_TOFROM); }
/// alloc: neither; the host function gets memory of that size.
template <class T> __device__ inline Mapped alloc(const T* pointer, u64 count) { return detail::map(pointer, count, AO_MAP_ALLOC); }

class Launch;

/// A call under way: from call_async, to poll or wait. If it goes out of scope, the reply is dropped.
/// One that stands for no call, or whose call is over, may be assigned another.
class Pending {
  public:
    __device__ Pending() : launch_(nullptr), ticket_(0), function_(0), cell_(AO_NO_CELL), status_(Status::OK) {}
    __device__ Pending(Pending&& other) : launch_(other.launch_), ticket_(other.ticket_), function_(other.function_), cell_(other.cell_), status_(other.status_) {
        other.cell_ = AO_NO_CELL;
    }
    Pending(const Pending&) = delete;
    Pending& operator=(const Pending&) = delete;
    __device__ inline Pending& operator=(Pending&& other);
    __device__ inline ~Pending();

  private:
    friend class Launch;
    __device__ inline void drop();
    __device__ Pending(Launch* launch, Function f, u64 ticket, unsigned cell, Status status)
        : launch_(launch), ticket_(ticket), function_(f.id), cell_(cell), status_(status) {}
    Launch* launch_;
    u64 ticket_;
    unsigned function_;
    unsigned cell_;  // AO_NO_CELL once over: then status_ says how
    Status status_;
};

/// The first parameter of a kernel that calls. Pass it on by reference.
class Launch {
  public:
    /// Call `f` and wait for its result. `out` is undefined unless the status is OK; None for no result.
    template <class R, class... A> __device__ Status call(Function f, R& out, const A&... arguments) {
        Pending pending = send(f, arguments...);
        return wait(pending, out);
    }
    template <class... A> __device__ Status call(Function f, None&& none, const A&... arguments) {
        return call<None>(f, none, arguments...);
    }

    /// Call `f` without waiting. Every one that was made has to be waited for, polled to its end or dropped.
    template <class... A> __device__ Pending call_async(Function f, const A&... arguments) {
        Pending pending = send(f, arguments...);
        // The host may sleep, and the caller has something else to do.
        if (pending.cell_ != AO_NO_CELL) detail::store_release(bell_, 1);
        return pending;
    }

    /// Whether `pending` is over; then `status` and `out` are set as by wait(). Never sleeps.
    template <class R> __device__ bool poll(Pending& pending, R& out, Status& status) {
        status = pending.status_;
        if (pending.cell_ == AO_NO_CELL) return true;
        u64 value, control;
        detail::load_pair_acquire(cell(pending.cell_), value, control);
        if (control >> AO_REPLY_TICKET_SHIFT != pending.ticket_ + 1) return false;
        status = take_reply(pending, out, value, control);
        return true;
    }

    /// Wait for the result of `pending`.
    template <class R> __device__ Status wait(Pending& pending, R& out) {
        u64 value, control;
        if (pending.cell_ == AO_NO_CELL || !await_reply(pending, value, control)) return pending.status_;
        return take_reply(pending, out, value, control);
    }

    /// Tell `f` something, without a reply. TIMEOUT if the host read nothing for the whole deadline.
    template <class... A> __device__ Status post(Function f, const A&... arguments) {
        if (detail::packed_nbytes<A...>() > AO_PAYLOAD_NBYTES) {
            return fail(f, AO_CODE_TOO_LARGE);
        }
        Status status = reserve_post();
        if (status == Status::TIMEOUT) report(f, AO_CODE_NO_ANSWER);
        if (status != Status::OK) return status;
        publish(f, AO_NO_CELL, arguments...);
        detail::store_release(bell_, 1);
        return Status::OK;
    }

    /// One call for all active lanes of the warp, with the arguments of one of them; all get the result.
    template <class R, class... A> __device__ Status warp_call(Function f, R& out, const A&... arguments) {
        unsigned mask = __activemask(), leader = __ffs(mask) - 1;
        int status = 0;
        if (detail::lane_id() == leader) status = static_cast<int>(call(f, out, arguments...));
        __syncwarp(mask);
        broadcast(mask, leader, &out, detail::Size<R>::value);
        error_ = __shfl_sync(mask, error_, leader);
        return static_cast<Status>(__shfl_sync(mask, status, leader));
    }
    template <class... A> __device__ Status warp_call(Function f, None&& none, const A&... arguments) {
        return warp_call<None>(f, none, arguments...);
    }

    /// One post for all active lanes of the warp, with the arguments of one of them.
    template <class... A> __device__ Status warp_post(Function f, const A&... arguments) {
        unsigned mask = __activemask(), leader = __ffs(mask) - 1;
        int status = 0;
        if (detail::lane_id() == leader) status = static_cast<int>(post(f, arguments...));
        __syncwarp(mask);
        return static_cast<Status>(__shfl_sync(mask, status, leader));
    }

    /// As if each active lane of the warp made its call, in one request: the host function runs once per
    /// lane (a batch function sees that many rows), and all succeed or all fail.
    template <class R, class... A> __device__ Status warp_call_each(Function f, R& out, const A&... arguments) {
        constexpr unsigned row = detail::packed_nbytes<A...>(), reply = detail::Size<R>::value;
        if (32 * row > AO_PAYLOAD_NBYTES || 32 * reply > AO_PAYLOAD_NBYTES || row == 0) return call(f, out, arguments...);
        unsigned mask = __activemask(), leader = __ffs(mask) - 1;
        unsigned index = __popc(mask & ((1u << detail::lane_id()) - 1)), rows = __popc(mask), taken = 0;
        u64 ticket = 0;
        int status = 0;
        if (detail::lane_id() == leader) {
            status = static_cast<int>(take_cell(taken));
            if (status == AO_STATUS_OK) ticket = take_ticket();
        }
        __syncwarp(mask);
        status = __shfl_sync(mask, status, leader);
        if (status != AO_STATUS_OK) {
            if (status == AO_STATUS_TIMEOUT) report(f, AO_CODE_NO_ANSWER);
            return static_cast<Status>(status);
        }
        ticket = __shfl_sync(mask, ticket, leader);
        taken = __shfl_sync(mask, taken, leader);
        alignas(16) unsigned char bytes[row ? row : 1];
        detail::pack(bytes, arguments...);
        memcpy(payload(ticket) + index * row, bytes, row);
        __syncwarp(mask);  // the leader's release store publishes what the others have written
        if (detail::lane_id() == leader) {
            u64 extent = static_cast<u64>(rows * row) | static_cast<u64>(rows) << 16;
            detail::store_pair_release(slot(ticket), extent, control(f, taken, AO_FORM_ROWS, ticket));
        }
        u64 value = 0;
        bool replied = false;
        if (detail::lane_id() == leader) {
            Pending pending(this, f, ticket, taken, Status::OK);
            u64 control;
            replied = await_reply(pending, value, control);
            status = static_cast<int>(replied ? check_reply<R>(f, rows, value, control) : pending.status_);
            pending.cell_ = AO_NO_CELL;  // freed below, when all have read their part
        }
        __syncwarp(mask);
        status = __shfl_sync(mask, status, leader);
        error_ = __shfl_sync(mask, error_, leader);
        value = __shfl_sync(mask, value, leader);
        if (status == AO_STATUS_OK && reply) {
            unsigned char* to = reinterpret_cast<unsigned char*>(&out);
            if (rows * reply > AO_INLINE_NBYTES) read_reply(to, taken, index * reply, reply);
            else copy_out(to, reinterpret_cast<const unsigned char*>(&value) + index * reply, reply);
        }
        __syncwarp(mask);
        if (replied) free_cell(taken);
        return static_cast<Status>(status);
    }

    /// Whether the launch was asked to stop. Reads host memory: a microsecond or so.
    __device__ bool cancelled() {
        if (!detail::load_acquire(block() + AO_LAUNCH_CANCEL)) return false;
        detail::store_relaxed(block() + AO_LAUNCH_SEEN, 1);
        return true;
    }

    /// Say how far the launch is. For one thread at a time to call; costs a store.
    __device__ void progress(u64 done, u64 total) { detail::store_pair(block() + AO_LAUNCH_PROGRESS, done, total); }

    /// End the launch, and with it the use of any GPU by this process, with a message that the host can read.
    __device__ void abort(int code, const char* text) {
        if (atomicExch(reinterpret_cast<unsigned*>(state_ + AO_STATE_ABORT), 1u) == 0) {
            unsigned char* record = shared_ + AO_ABORT_OFFSET;
            u64 length = 0;
            for (; text[length] && length < AO_ABORT_NBYTES - AO_ABORT_TEXT; ++length) record[AO_ABORT_TEXT + length] = text[length];
            detail::store_relaxed(record + 8, static_cast<u64>(static_cast<long long>(code)));
            detail::store_relaxed(record + 16, length);
            detail::store_release(record, launch_ + 1);
            detail::store_release(bell_, 1);
        } else {  // a trap stops all threads: the one that writes the message needs a moment
            detail::Wait clock;
            while (!detail::load_acquire(shared_ + AO_ABORT_OFFSET) && clock.elapsed() < detail::ABORT_NS) __nanosleep(1000);
        }
        __threadfence_system();
        asm volatile("trap;");
    }

    /// The code of the last ERROR that this object returned: the handler's own if positive, else AO_CODE_*.
    __device__ int error() const { return error_; }

    /// Let the waits of this object end after so many nanoseconds instead of the Offload's deadline.
    __device__ void set_timeout_ns(u64 timeout_ns) { timeout_ns_ = timeout_ns; }

  private:
    friend class Pending;

    unsigned char* shared_;
    unsigned char* state_;
    u64* bell_;
    u64 timeout_ns_;
    unsigned launch_, version_;
    int error_;  // 0 at the start
    unsigned reserved_[5];

    __device__ unsigned char* block() const { return shared_ + AO_LAUNCHES_OFFSET + launch_ * AO_LAUNCH_STRIDE; }
    __device__ unsigned char* slot(u64 ticket) const { return shared_ + AO_RING_OFFSET + ticket % AO_RING_SLOTS * 16; }
    __device__ unsigned char* cell(unsigned index) const { return shared_ + AO_CELLS_OFFSET + static_cast<u64>(index) * AO_CELL_STRIDE; }
    __device__ unsigned char* payload(u64 ticket) const {
        return shared_ + AO_PAYLOADS_OFFSET + ticket % AO_RING_SLOTS * AO_PAYLOAD_NBYTES;
    }
    __device__ unsigned* bitmap(unsigned offset, unsigned word) const { return reinterpret_cast<unsigned*>(state_ + offset) + word; }

    // The host may sleep. Somebody who rings after `published_ns` rings for that request, too.
    __device__ void ring_bell(u64 published_ns) {
        u64* rung = reinterpret_cast<u64*>(state_ + AO_STATE_RUNG);
        u64 last = detail::load_relaxed(rung);
        if (last > published_ns || atomicCAS(rung, last, detail::clock_ns()) != last) return;
        detail::store_release(bell_, 1);
    }

    // -- requests --

    // Who waits for the reply rings the bell if none comes soon; who does not rings it at once.
    template <class... A> __device__ Pending send(Function f, const A&... arguments) {
        if (detail::packed_nbytes<A...>() > AO_PAYLOAD_NBYTES) {
            fail(f, AO_CODE_TOO_LARGE);
            return Pending(this, f, 0, AO_NO_CELL, Status::ERROR);
        }
        unsigned cell;
        Status status = take_cell(cell);
        if (status != Status::OK) {
            if (status == Status::TIMEOUT) report(f, AO_CODE_NO_ANSWER);
            return Pending(this, f, 0, AO_NO_CELL, status);
        }
        return Pending(this, f, publish(f, cell, arguments...), cell, Status::OK);
    }

    __device__ u64 take_ticket() { return atomicAdd(reinterpret_cast<u64*>(state_ + AO_STATE_HEAD), 1ull); }

    __device__ u64 control(Function f, unsigned cell, unsigned form, u64 ticket) const {
        u64 tag = (ticket / AO_RING_SLOTS + 1) & ((1u << AO_TAG_BITS) - 1);
        return (f.id & ((1u << AO_FUNCTION_BITS) - 1)) | static_cast<u64>(launch_) << AO_LAUNCH_SHIFT |
               static_cast<u64>(cell) << AO_CELL_SHIFT | static_cast<u64>(form) << AO_FORM_SHIFT | tag << AO_TAG_SHIFT;
    }

    // Whoever gets here holds a cell or a place for a post, so the slot is free.
    template <class... A> __device__ u64 publish(Function f, unsigned cell, const A&... arguments) {
        constexpr unsigned nbytes = detail::packed_nbytes<A...>();
        u64 ticket = take_ticket(), argument = 0;
        if constexpr (sizeof...(A) == 0) {
            detail::store_pair_release(slot(ticket), 0, control(f, cell, 0, ticket));
        } else if constexpr (nbytes <= AO_INLINE_NBYTES) {
            alignas(8) unsigned char bytes[AO_INLINE_NBYTES] = {};
            detail::pack(bytes, arguments...);
            memcpy(&argument, bytes, AO_INLINE_NBYTES);
            detail::store_pair_release(slot(ticket), argument, control(f, cell, nbytes, ticket));
        } else {
            constexpr unsigned padded = detail::align_up(nbytes, 16);
            alignas(16) unsigned char bytes[padded] = {};
            detail::pack(bytes, arguments...);
            for (unsigned i = 0; i < padded; i += 16) {
                u64 pair[2];
                memcpy(pair, bytes + i, 16);
                detail::store_pair(payload(ticket) + i, pair[0], pair[1]);
            }
            detail::store_pair_release(slot(ticket), nbytes | 1ull << 16, control(f, cell, AO_FORM_PAYLOAD, ticket));
        }
        return ticket;
    }

    __device__ Status reserve_post() {
        u64* reserved = reinterpret_cast<u64*>(state_ + AO_STATE_POSTS);
        u64* tail = reinterpret_cast<u64*>(state_ + AO_STATE_TAIL);
        if (static_cast<long long>(atomicAdd(reserved, 1ull) - detail::load_relaxed(tail)) < AO_POSTS) return Status::OK;
        atomicAdd(reserved, ~0ull);
        detail::Wait clock;
        bool rung = false;
        for (;;) {
            refresh_tail(tail);
            // A look before each try: failed tries make others fail, too.
            if (static_cast<long long>(detail::load_relaxed(reserved) - detail::load_relaxed(tail)) < AO_POSTS) {
                if (static_cast<long long>(atomicAdd(reserved, 1ull) - detail::load_relaxed(tail)) < AO_POSTS) return Status::OK;
                atomicAdd(reserved, ~0ull);
            }
            u64 elapsed = clock.elapsed();
            if (!rung && elapsed > detail::BELL_NS) {
                detail::store_release(bell_, 1);
                rung = true;
            }
            if (clock.is_impatient(elapsed) && cancelled()) return Status::CANCELLED;
            if (elapsed > timeout_ns_) return Status::TIMEOUT;
            detail::Wait::sleep(elapsed + detail::CROWD_NS);
        }
    }

    // One thread at a time reads the host's tail, once a microsecond: each read crosses the bus.
    __device__ void refresh_tail(u64* tail) {
        u64* next = reinterpret_cast<u64*>(state_ + AO_STATE_REFRESH);
        u64 due = detail::load_relaxed(next), now = detail::clock_ns();
        if (now < due || atomicCAS(next, due, now + detail::REFRESH_NS) != due) return;
        atomicMax(tail, detail::load_acquire(shared_ + AO_TAIL_OFFSET));
    }

    // -- reply cells --

    // A thread starts where no other does as long as there are fewer threads than cells.
    __device__ unsigned first_guess() const {
        unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        unsigned warps = (blockDim.x * blockDim.y * blockDim.z + 31) / 32;
        // Neighbours in the bitmap are different warps, since most warps call with one lane.
        return (block * warps + thread / 32 + (thread % 32) * 509 + launch_ * 1021) % AO_CELLS;
    }

    __device__ bool try_cell(unsigned index) {
        unsigned bit = 1u << (index % 32);
        return !(atomicOr(bitmap(AO_STATE_TAKEN, index / 32), bit) & bit);
    }

    __device__ Status take_cell(unsigned& index) {
        index = first_guess();
        if (try_cell(index)) return Status::OK;
        detail::Wait clock;
        for (;;) {
            for (unsigned k = 0; k < detail::BITMAP_WORDS; ++k) {
                unsigned word = (index / 32 + k) % detail::BITMAP_WORDS;
                unsigned taken = *reinterpret_cast<volatile unsigned*>(bitmap(AO_STATE_TAKEN, word));
                while (taken != ~0u) {
                    unsigned candidate = word * 32 + __ffs(~taken) - 1;
                    if (try_cell(candidate)) {
                        index = candidate;
                        return Status::OK;
                    }
                    taken |= 1u << (candidate % 32);
                }
                if (reclaim(word, index)) return Status::OK;
            }
            u64 elapsed = clock.elapsed();
            if (clock.is_impatient(elapsed) && cancelled()) return Status::CANCELLED;
            if (elapsed > timeout_ns_) return Status::TIMEOUT;
            detail::Wait::sleep(elapsed);
        }
    }

    __device__ void free_cell(unsigned index) {
        __threadfence();  // reads of the reply come before the next owner's request
        atomicAnd(bitmap(AO_STATE_TAKEN, index / 32), ~(1u << (index % 32)));
    }

    // The caller gives up: the cell is nobody's until the host has written its reply, late as it is.
    __device__ void leave_cell(unsigned index, u64 ticket) {
        reinterpret_cast<u64*>(state_ + AO_STATE_TICKETS)[index] = ticket;
        __threadfence();
        atomicOr(bitmap(AO_STATE_LEFT, index / 32), 1u << (index % 32));
    }

    // Takes a cell that was left and has got its reply meanwhile.
    __device__ bool reclaim(unsigned word, unsigned& index) {
        unsigned left = *reinterpret_cast<volatile unsigned*>(bitmap(AO_STATE_LEFT, word));
        for (; left; left &= left - 1) {
            unsigned candidate = word * 32 + __ffs(left) - 1, bit = 1u << (candidate % 32);
            __threadfence();
            u64 ticket = reinterpret_cast<volatile u64*>(state_ + AO_STATE_TICKETS)[candidate];
            if (detail::load_acquire(cell(candidate) + 8) >> AO_REPLY_TICKET_SHIFT != ticket + 1) continue;
            if (!(atomicAnd(bitmap(AO_STATE_LEFT, word), ~bit) & bit)) continue;  // somebody else took it
            // Between the two looks it may have been used and left once more.
            __threadfence();
            ticket = reinterpret_cast<volatile u64*>(state_ + AO_STATE_TICKETS)[candidate];
            index = candidate;
            if (detail::load_acquire(cell(candidate) + 8) >> AO_REPLY_TICKET_SHIFT == ticket + 1) return true;
            atomicOr(bitmap(AO_STATE_LEFT, word), bit);
        }
        return false;
    }

    // -- replies --

    template <class R> __device__ Status take_reply(Pending& pending, R& out, u64 value, u64 control) {
        Status status = check_reply<R>(pending.function_, 1, value, control);
        if (status == Status::OK && detail::Size<R>::value) {
            constexpr unsigned nbytes = detail::Size<R>::value;
            if (nbytes <= AO_INLINE_NBYTES) copy_out(reinterpret_cast<unsigned char*>(&out), reinterpret_cast<unsigned char*>(&value), nbytes);
            else read_reply(reinterpret_cast<unsigned char*>(&out), pending.cell_, 0, nbytes);
        }
        free_cell(pending.cell_);
        pending.cell_ = AO_NO_CELL;
        return pending.status_ = status;
    }

    template <class R> __device__ Status check_reply(Function f, unsigned rows, u64 value, u64 control) {
        static_assert(__is_trivially_copyable(R), "the result of a call is trivially copyable");
        Status status = static_cast<Status>(control >> AO_REPLY_STATUS_SHIFT & 7);
        if (status == Status::ERROR) error_ = static_cast<int>(value);
        if (status != Status::OK) return status;
        unsigned nbytes = control & 1023, kind = control >> AO_REPLY_KIND_SHIFT & 7;
        constexpr unsigned wanted = detail::Kind<R>::value, size = detail::Size<R>::value;
        bool same_kind = wanted == AO_KIND_STRUCT || kind == AO_KIND_STRUCT || kind == wanted;
        if (size == 0 || (nbytes == rows * size && same_kind)) return Status::OK;
        return fail(f, AO_CODE_WRONG_REPLY);
    }

    // Waits for a reply; false if the wait ended without one, and the cell was left.
    __device__ bool await_reply(Pending& pending, u64& value, u64& control) {
        const unsigned char* address = cell(pending.cell_);
        detail::Wait clock;
        bool rung = false;
        for (;;) {
            detail::load_pair_acquire(address, value, control);
            if (control >> AO_REPLY_TICKET_SHIFT == pending.ticket_ + 1) return true;
            u64 elapsed = clock.elapsed();
            if (!rung && elapsed > detail::BELL_NS) {
                ring_bell(clock.start);
                rung = true;
            }
            bool stopped = clock.is_impatient(elapsed) && cancelled();
            if (!stopped && elapsed <= timeout_ns_) {
                detail::Wait::sleep(elapsed);
                continue;
            }
            // This thread may have been held up since it looked: what was answered before the end of the wait counts.
            detail::load_pair_acquire(address, value, control);
            if (control >> AO_REPLY_TICKET_SHIFT == pending.ticket_ + 1) return true;
            if (stopped) return leave(pending, Status::CANCELLED);
            report(pending.function_, AO_CODE_NO_ANSWER);
            return leave(pending, Status::TIMEOUT);
        }
    }

    __device__ static void copy_out(unsigned char* to, const unsigned char* from, unsigned nbytes) {
        for (unsigned i = 0; i < nbytes; ++i) to[i] = from[i];
    }

    __device__ void read_reply(unsigned char* to, unsigned index, unsigned offset, unsigned nbytes) const {
        const unsigned char* data = cell(index) + AO_CELL_DATA;
        for (unsigned i = 0; i < nbytes;) {
            u64 pair[2];
            unsigned at = (offset + i) / 16 * 16, skip = offset + i - at, count = 16 - skip;
            if (count > nbytes - i) count = nbytes - i;
            detail::load_pair(data + at, pair[0], pair[1]);
            copy_out(to + i, reinterpret_cast<unsigned char*>(pair) + skip, count);
            i += count;
        }
    }

    __device__ bool leave(Pending& pending, Status status) {
        leave_cell(pending.cell_, pending.ticket_);
        pending.cell_ = AO_NO_CELL;
        pending.status_ = status;
        return false;
    }

    // The host does not see what goes wrong on this side: its launch must not pass for a success.
    // The first trouble stays; where two threads are in trouble at the same moment, either's. A call that was given up
    // has a word of its own: whatever else goes wrong, the host has to know that what was called is to be cancelled.
    __device__ void report(Function f, int code) {
        unsigned char* word = block() + (code == AO_CODE_NO_ANSWER ? AO_LAUNCH_GIVEN_UP : AO_LAUNCH_TROUBLE);
        if (!detail::load_acquire(word)) detail::store_relaxed(word, (f.id + 1) | static_cast<u64>(-code) << 32);
    }

    __device__ Status fail(Function f, int code) {
        error_ = code;
        report(f, code);
        return Status::ERROR;
    }

    __device__ static void broadcast(unsigned mask, unsigned leader, void* data, unsigned nbytes) {
        unsigned char* bytes = static_cast<unsigned char*>(data);
        for (unsigned i = 0; i < nbytes; i += 4) {
            unsigned count = nbytes - i < 4 ? nbytes - i : 4, word = 0;
            memcpy(&word, bytes + i, count);
            word = __shfl_sync(mask, word, leader);
            memcpy(bytes + i, &word, count);
        }
    }
};

static_assert(sizeof(Launch) == AO_PARAMETER_NBYTES, "ao::Launch has the size the host packs");
static_assert(AO_RING_SLOTS == AO_CELLS + AO_POSTS && (AO_RING_SLOTS & (AO_RING_SLOTS - 1)) == 0, "a slot for everybody");
static_assert(AO_TAG_SHIFT + AO_TAG_BITS == 64 && AO_NO_CELL == (1 << AO_CELL_BITS) - 1 && AO_CELLS <= AO_NO_CELL, "the descriptor is full");
static_assert(AO_SHARED_NBYTES == AO_PAYLOADS_OFFSET + AO_RING_SLOTS * AO_PAYLOAD_NBYTES, "the shared block ends with the payloads");

__device__ inline void Pending::drop() {
    if (cell_ != AO_NO_CELL) launch_->leave_cell(cell_, ticket_);
    cell_ = AO_NO_CELL;
}

__device__ inline Pending::~Pending() { drop(); }

__device__ inline Pending& Pending::operator=(Pending&& other) {
    if (this == &other) return *this;
    drop();
    launch_ = other.launch_;
    ticket_ = other.ticket_;
    function_ = other.function_;
    status_ = other.status_;
    cell_ = other.cell_;
    other.cell_ = AO_NO_CELL;
    return *this;
}

}  // namespace ao

#endif
