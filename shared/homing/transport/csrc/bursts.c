/* A burst of multipart messages in one call: what a loop over pyzmq does in Python, frame by frame.
 *
 * Called with the GIL held (ctypes.PyDLL). No header of Python's or libzmq's is needed: the few
 * functions of Python's stable ABI are declared here and found in the process, those of libzmq are
 * handed in. Never waits.
 */
#include <errno.h>
#include <stddef.h>

typedef struct _object PyObject;
typedef ptrdiff_t Py_ssize_t;

PyObject *PyBytes_FromStringAndSize(const char *, Py_ssize_t);
int PyBytes_AsStringAndSize(PyObject *, char **, Py_ssize_t *);
PyObject *PyList_New(Py_ssize_t);
int PyList_Append(PyObject *, PyObject *);
Py_ssize_t PyList_Size(PyObject *);
PyObject *PyList_GetItem(PyObject *, Py_ssize_t);
PyObject *PyTuple_Pack(Py_ssize_t, ...);
PyObject *PyTuple_GetItem(PyObject *, Py_ssize_t);
void PyErr_Clear(void);
void Py_DecRef(PyObject *);

typedef struct { _Alignas(8) unsigned char bytes[64]; } zmq_msg; /* zmq_msg_t of libzmq 4 */

struct zmq {
    int (*msg_init)(zmq_msg *);
    int (*msg_recv)(zmq_msg *, void *socket, int flags);
    void *(*msg_data)(zmq_msg *);
    size_t (*msg_size)(zmq_msg *);
    int (*msg_more)(zmq_msg *);
    int (*msg_close)(zmq_msg *);
    int (*send)(void *socket, const void *data, size_t size, int flags);
};

enum { DONTWAIT = 1, SNDMORE = 2 };
enum { NOT_OURS = -1 };

/* NULL where none came, with an errno, or where Python has no memory, with its error set. */
static PyObject *receive_frame(const struct zmq *zmq, void *socket, int *more, int *error)
{
    zmq_msg message;
    int received;
    zmq->msg_init(&message);
    do
        received = zmq->msg_recv(&message, socket, DONTWAIT);
    while (received < 0 && errno == EINTR);
    if (received < 0) {
        *error = errno;
        return NULL;
    }
    *more = zmq->msg_more(&message);
    PyObject *frame = PyBytes_FromStringAndSize(zmq->msg_data(&message), zmq->msg_size(&message));
    zmq->msg_close(&message);
    return frame;
}

/* What is left of a message must not be taken for another. */
static void drop_rest(const struct zmq *zmq, void *socket, int more)
{
    while (more) {
        zmq_msg message;
        zmq->msg_init(&message);
        more = zmq->msg_recv(&message, socket, DONTWAIT) >= 0 ? zmq->msg_more(&message)
                                                              : errno == EINTR;
        zmq->msg_close(&message);
    }
}

/* The frames of a message after its first. libzmq has them all where it has the first. */
static PyObject *receive_rest(const struct zmq *zmq, void *socket, int more, int *error)
{
    PyObject *frames = PyList_New(0);
    if (!frames)
        drop_rest(zmq, socket, more);
    while (frames && more) {
        PyObject *frame = receive_frame(zmq, socket, &more, error);
        int failed = !frame || PyList_Append(frames, frame) < 0;
        if (frame)
            Py_DecRef(frame);
        if (failed) {
            drop_rest(zmq, socket, more);
            Py_DecRef(frames);
            return NULL;
        }
    }
    return frames;
}

/* Of a ROUTER: a list of (identity, [frame, ...]) of the messages that are there, so many at most.
 * *error is why it ends before that. NULL with Python's error set where it has no memory. */
PyObject *receive_burst(const struct zmq *zmq, void *socket, int max_messages, int *error)
{
    PyObject *burst = PyList_New(0);
    *error = 0;
    while (burst && max_messages--) {
        int more = 0, failed = 1;
        PyObject *identity = receive_frame(zmq, socket, &more, error);
        if (!identity && *error)
            return burst;
        if (!identity)
            drop_rest(zmq, socket, more);
        PyObject *frames = identity ? receive_rest(zmq, socket, more, error) : NULL;
        PyObject *message = frames ? PyTuple_Pack(2, identity, frames) : NULL;
        if (message) {
            failed = PyList_Append(burst, message) < 0;
            Py_DecRef(message);
        }
        if (frames)
            Py_DecRef(frames);
        if (identity)
            Py_DecRef(identity);
        if (failed && *error)
            return burst;
        if (failed) {
            Py_DecRef(burst);
            return NULL;
        }
    }
    return burst;
}

/* Whether a message is of bytes alone, and of one frame at least. */
static int is_ours(PyObject *frames)
{
    Py_ssize_t num_frames = PyList_Size(frames);
    for (Py_ssize_t i = 0; i < num_frames; i++) {
        char *data;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(PyList_GetItem(frames, i), &data, &size) < 0) {
            PyErr_Clear();
            return 0;
        }
    }
    if (num_frames < 0)
        PyErr_Clear();
    return num_frames > 0;
}

static int send_frame(const struct zmq *zmq, void *socket, PyObject *frame, int flags)
{
    char *data;
    Py_ssize_t size;
    int sent;
    PyBytes_AsStringAndSize(frame, &data, &size);
    do
        sent = zmq->send(socket, data, size, flags | DONTWAIT);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? errno : 0;
}

/* Send messages[at:], each (identity, [frame, ...]), up to one that cannot be: returns its index,
 * and in *error why, an errno, or NOT_OURS for one that the caller has to send. */
int send_burst(const struct zmq *zmq, void *socket, PyObject *messages, int at, int *error)
{
    int num_messages = PyList_Size(messages);
    *error = 0;
    for (; at < num_messages; at++) {
        PyObject *message = PyList_GetItem(messages, at);
        PyObject *frames = PyTuple_GetItem(message, 1);
        if (!is_ours(frames)) {
            *error = NOT_OURS;
            return at;
        }
        *error = send_frame(zmq, socket, PyTuple_GetItem(message, 0), SNDMORE);
        Py_ssize_t num_frames = PyList_Size(frames);
        for (Py_ssize_t i = 0; !*error && i < num_frames; i++) {
            int flags = i + 1 < num_frames ? SNDMORE : 0;
            *error = send_frame(zmq, socket, PyList_GetItem(frames, i), flags);
        }
        if (*error)
            return at;
    }
    return at;
}
