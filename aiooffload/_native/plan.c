/* The geometry of a launch, and an estimate of how long it takes.
 *
 * The estimate is what lets the loop sleep until shortly before a completion is due: the median of
 * the last few durations, so that one disturbed launch changes nothing. The board feeds it one of
 * two kinds of sample:
 *   exact     the board was looking all the time, so the duration is known;
 *   censored  the board came back from a sleep and the mark was there: the true end lies
 *             somewhere in (lower, upper).
 * A late wake must not teach a longer duration, or the estimate would drift up for ever: a
 * censored sample takes something off the estimate, more with each, until the loop wakes early
 * enough to see the end as it happens, and what it sees then replaces the guesses. One that says the
 * estimate was too short, although the loop looked and waited, starts over from what was seen: the
 * kernel has got longer (its duration may follow its arguments), and creeping up to that would cost
 * a late wake for each step.
 */
#include "native.h"

#define PROBE 0.03         /* what the first of several censored samples takes off the estimate, */
#define MAX_PROBES 3       /* each following one twice as much, up to 24 % */
#define SCATTER_LIMIT 2.0  /* longest over shortest sample above which nothing is predicted */
#define MIN_SAMPLES 2

static void estimate(AoPlan *plan) {
    double sorted[AO_PLAN_WINDOW];
    uint32_t count = plan->samples < AO_PLAN_WINDOW ? plan->samples : AO_PLAN_WINDOW;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t j = i;
        for (; j > 0 && sorted[j - 1] > plan->recent_ns[i]; j--) sorted[j] = sorted[j - 1];
        sorted[j] = plan->recent_ns[i];
    }
    plan->median_ns = sorted[(count - 1) / 2];
    plan->steady = sorted[count - 1] <= SCATTER_LIMIT * sorted[0];
}

/* Forgets all other samples. */
static void replace(AoPlan *plan, double duration_ns) {
    for (int i = 0; i < AO_PLAN_WINDOW; i++) plan->recent_ns[i] = duration_ns;
    plan->samples++;
    estimate(plan);
}

void ao_plan_record(AoPlan *plan, int64_t duration_ns) {
    double sample = (double)(duration_ns > 0 ? duration_ns : 0);
    if (plan->probes) {
        plan->probes = 0;
        replace(plan, sample);
        return;
    }
    plan->recent_ns[plan->samples++ % AO_PLAN_WINDOW] = sample;
    estimate(plan);
}

void ao_plan_record_between(AoPlan *plan, int64_t lower_ns, int64_t upper_ns) {
    double lower = (double)(lower_ns > 0 ? lower_ns : 0), upper = (double)upper_ns;
    double from = plan->samples == 0 || plan->median_ns < lower || plan->median_ns > upper ? upper : plan->median_ns;
    double step = PROBE * (double)(1 << plan->probes);
    if (plan->probes < MAX_PROBES) plan->probes++;
    double probed = from * (1.0 - step);
    replace(plan, probed > lower ? probed : lower);
}

int64_t ao_plan_expected(const AoPlan *plan) {
    if (plan->samples < MIN_SAMPLES || !plan->steady) return 0;
    return plan->median_ns > 1.0 ? (int64_t)plan->median_ns : 1;
}

#define TINY_NS 10000.0
#define TINY_RUNS 16       /* calls of which the longest counts: one that ever took longer is not tiny */

/* The longest run, forgotten slowly: a kernel that sometimes waits must not count as tiny in between. */
void ao_plan_ran(AoPlan *plan, int64_t run_ns) {
    double faded = plan->run_ns * 0.99;
    plan->run_ns = (double)run_ns > faded ? (double)run_ns : faded;
    if (plan->runs < UINT32_MAX) plan->runs++;
}

int ao_plan_is_tiny(const AoPlan *plan) { return plan->runs >= TINY_RUNS && plan->run_ns < TINY_NS; }

static int triple(PyObject *value, unsigned out[3], const char *what) {
    if (!PyTuple_Check(value) || PyTuple_GET_SIZE(value) != 3) {
        PyErr_Format(PyExc_TypeError, "%s is a tuple of 3 integers", what);
        return -1;
    }
    for (int i = 0; i < 3; i++) {
        unsigned long number = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(value, i));
        if (number == (unsigned long)-1 && PyErr_Occurred()) return -1;
        if (number > UINT32_MAX) {
            PyErr_Format(PyExc_ValueError, "%s has a number beyond 32 bits", what);
            return -1;
        }
        out[i] = (unsigned)number;
    }
    return 0;
}

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"name", "function", "callable", "grid", "block", "shared_bytes", "cluster", "cooperative", NULL};
    PyObject *name, *callable, *grid, *block, *cluster;
    unsigned long long function;
    unsigned shared_bytes;
    int cooperative;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UKOOOIOp:LaunchPlan", names, &name, &function, &callable, &grid,
                                     &block, &shared_bytes, &cluster, &cooperative))
        return NULL;
    AoPlan *self = (AoPlan *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->name = Py_NewRef(name);
    self->function = (void *)(uintptr_t)function;
    self->callable = callable == Py_None ? NULL : Py_NewRef(callable);
    self->shared_bytes = shared_bytes;
    self->cooperative = cooperative;
    if (triple(grid, self->grid, "grid") < 0 || triple(block, self->block, "block") < 0 ||
        (cluster != Py_None && triple(cluster, self->cluster, "cluster") < 0)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int plan_traverse(AoPlan *self, visitproc visit, void *arg) {
    Py_VISIT(self->callable);
    return 0;
}

static int plan_clear(AoPlan *self) {
    Py_CLEAR(self->callable);
    return 0;
}

static void plan_dealloc(AoPlan *self) {
    PyObject_GC_UnTrack(self);
    plan_clear(self);
    Py_CLEAR(self->name);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *plan_py_record(AoPlan *self, PyObject *value) {
    long long duration = PyLong_AsLongLong(value);
    if (duration == -1 && PyErr_Occurred()) return NULL;
    ao_plan_record(self, duration);
    Py_RETURN_NONE;
}

static PyObject *plan_py_record_between(AoPlan *self, PyObject *args) {
    long long lower, upper;
    if (!PyArg_ParseTuple(args, "LL:record_between", &lower, &upper)) return NULL;
    ao_plan_record_between(self, lower, upper);
    Py_RETURN_NONE;
}

static PyObject *three(const unsigned values[3]) { return Py_BuildValue("(III)", values[0], values[1], values[2]); }
static PyObject *plan_grid(AoPlan *self, void *Py_UNUSED(c)) { return three(self->grid); }
static PyObject *plan_block(AoPlan *self, void *Py_UNUSED(c)) { return three(self->block); }
static PyObject *plan_function(AoPlan *self, void *Py_UNUSED(c)) {
    return PyLong_FromUnsignedLongLong((uintptr_t)self->function);
}
static PyObject *plan_expected(AoPlan *self, void *Py_UNUSED(c)) { return PyLong_FromLongLong(ao_plan_expected(self)); }

static PyMethodDef plan_methods[] = {
    {"record", (PyCFunction)plan_py_record, METH_O, "Take an exactly measured duration into the estimate."},
    {"record_between", (PyCFunction)plan_py_record_between, METH_VARARGS, "Take a censored duration into the estimate."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef plan_members[] = {
    {"name", T_OBJECT, offsetof(AoPlan, name), READONLY, NULL},
    {"callable", T_OBJECT, offsetof(AoPlan, callable), READONLY, NULL},
    {"shared_bytes", T_UINT, offsetof(AoPlan, shared_bytes), READONLY, NULL},
    {"samples", T_UINT, offsetof(AoPlan, samples), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef plan_getset[] = {
    {"grid", (getter)plan_grid, NULL, NULL, NULL},
    {"block", (getter)plan_block, NULL, NULL, NULL},
    {"function", (getter)plan_function, NULL, NULL, NULL},
    {"expected_ns", (getter)plan_expected, NULL, "Expected duration, 0 while unknown.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject AoPlan_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.LaunchPlan",
    .tp_doc = "Geometry of a launch on one device, with a running estimate of its duration.",
    .tp_basicsize = sizeof(AoPlan),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = plan_new,
    .tp_dealloc = (destructor)plan_dealloc,
    .tp_traverse = (traverseproc)plan_traverse,
    .tp_clear = (inquiry)plan_clear,
    .tp_methods = plan_methods,
    .tp_members = plan_members,
    .tp_getset = plan_getset,
};
