// Streams as queues of tasks.
//
// A task runs at once, in the calling thread, if its stream is idle. Otherwise, and always if it may wait (a collective,
// another stream's event), a thread of the stream runs it. The host therefore continues while a collective waits for
// its peers, as with a card.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

using Task = std::function<void()>;

// Number of a stream in the log. 0 is the default stream.
long host_cuda_stream_number(cudaStream_t stream);

// Runs a task that never waits, after all earlier tasks of the stream.
void host_cuda_run(cudaStream_t stream, Task task);

// Queues a task that may wait.
void host_cuda_enqueue(cudaStream_t stream, Task task);

// Block the calling thread until the stream, or all streams, are idle. Not in the log.
void host_cuda_drain(cudaStream_t stream);
extern "C" void host_cuda_drain_all();

// Adds a line of the Python program to the log: the memory that an operator of the stream uses.
extern "C" void host_cuda_mark_access(const char* text, cudaStream_t stream);
