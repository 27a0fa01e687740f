/* The module: registers what the other files define. */
#include "native.h"

static PyObject *now_ns(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    return PyLong_FromLongLong(ao_now_ns());
}

Py_ssize_t ao_open_streams, ao_open_events;

static PyObject *open_handles(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    return Py_BuildValue("(nn)", ao_open_streams, ao_open_events);
}

static PyMethodDef functions[] = {
    {"now_ns", now_ns, METH_NOARGS, "CLOCK_MONOTONIC in nanoseconds."},
    {"open_handles", open_handles, METH_NOARGS, "(streams, events) of any driver that are open and held."},
    {"pack", ao_pack, METH_VARARGS, "Pack kernel parameters; None if one needs the slow path."},
    {"dlpack_export", ao_dlpack_export, METH_VARARGS, "Describe memory in a DLPack capsule."},
    {"dlpack_import", ao_dlpack_import, METH_O, "Take what a DLPack capsule describes."},
    {"cuda_initialise", ao_cuda_initialise, METH_O, "Resolve the driver's entry points."},
    {"timer_slack", ao_timer_slack, METH_O, "Set the calling thread's timer slack in ns; returns the old one."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "aiooffload._native._core", .m_doc = "See aiooffload._native.", .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__core(void) {
    static struct {
        const char *name;
        PyTypeObject *type;
    } types[] = {
        {"Word", &AoWord_Type},
        {"LaunchPlan", &AoPlan_Type},
        {"Operation", &AoOperation_Type},
        {"Wait", &AoWait_Type},
        {"History", &AoHistory_Type},
        {"LaneQueue", &AoQueue_Type},
        {"Board", &AoBoard_Type},
        {"Launcher", &AoLauncher_Type},
        {"BoundLaunch", &AoBound_Type},
        {"Channel", &AoChannel_Type},
        {"Caller", &AoCaller_Type},
        {"Handler", &AoHandler_Type},
        {"Request", &AoRequest_Type},
        {"Port", &AoPort_Type},
        {"Timer", &AoTimer_Type},
        {"CudaStream", &AoCudaStream_Type},
        {"CudaEvent", &AoCudaEvent_Type},
        {"HostContext", &AoHostContext_Type},
        {"HostEvent", &AoHostEvent_Type},
        {"HostStream", &AoHostStream_Type},
    };
    PyObject *module = PyModule_Create(&definition);
    if (!module || ao_operation_module_init(module) < 0 || ao_channel_module_init(module) < 0 ||
        ao_pack_module_init() < 0)
        goto failed;
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        if (PyType_Ready(types[i].type) < 0) goto failed;
        if (PyModule_AddObjectRef(module, types[i].name, (PyObject *)types[i].type) < 0) goto failed;
    }
    return module;
failed:
    Py_XDECREF(module);
    return NULL;
}
