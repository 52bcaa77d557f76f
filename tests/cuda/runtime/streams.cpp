// Streams, events and the clock of events.
#include "streams.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "record.h"

namespace {

struct Stream {
  explicit Stream(long number) : number(number) {}
  const long number;
  std::deque<Task> queue;
  size_t pending = 0;  // queued or running
  bool has_thread = false;
};

// Shared with the queued tasks: an event may be recorded again, or destroyed, while a task still needs the old state.
struct Completion {
  std::atomic<bool> done{false};
  double seconds = 0.0;
};

struct Event {
  long number;
  std::shared_ptr<Completion> last;  // of the last record; null before
};

// Never destroyed: threads of streams may still run while the process exits.
std::mutex& mutex = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
std::vector<Stream*>& streams = *new std::vector<Stream*>{new Stream(0)};
std::atomic<long> next_event{1};

// Completions of the task that a stream's thread runs. They are published when the stream is no longer busy with it.
// Else a host that waited for an event could record the next one while the stream seems busy: it would be queued, and
// complete at a later time.
thread_local bool is_stream_thread = false;
thread_local std::vector<std::shared_ptr<Completion>> finished;

bool is_default(cudaStream_t stream) {
  return stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

Stream* find(cudaStream_t stream) { return is_default(stream) ? streams.front() : reinterpret_cast<Stream*>(stream); }

void work(Stream* stream) {
  is_stream_thread = true;
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    changed.wait(lock, [&] { return !stream->queue.empty(); });
    Task task = std::move(stream->queue.front());
    stream->queue.pop_front();
    lock.unlock();
    task();
    lock.lock();
    stream->pending--;
    for (auto& completion : finished) completion->done = true;
    finished.clear();
    changed.notify_all();
  }
}

void push(Stream* stream, Task task) {  // with the mutex held
  stream->pending++;
  stream->queue.push_back(std::move(task));
  if (!stream->has_thread) {
    stream->has_thread = true;
    std::thread(work, stream).detach();
  }
  changed.notify_all();
}

cudaError_t create(cudaStream_t* stream) {
  std::lock_guard<std::mutex> lock(mutex);
  streams.push_back(new Stream((long)streams.size()));
  *stream = reinterpret_cast<cudaStream_t>(streams.back());
  return cudaSuccess;
}

Event* as_event(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

bool is_done(const Event* event) { return !event->last || event->last->done; }

void complete(const std::shared_ptr<Completion>& completion) {
  completion->seconds = host_cuda_seconds();
  if (is_stream_thread) return finished.push_back(completion);
  std::lock_guard<std::mutex> lock(mutex);
  completion->done = true;
  changed.notify_all();
}

void wait_until_done(const std::shared_ptr<Completion>& completion) {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return completion->done.load(); });
}

}  // namespace

long host_cuda_stream_number(cudaStream_t stream) { return find(stream)->number; }

void host_cuda_run(cudaStream_t handle, Task task) {
  Stream* stream = find(handle);
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (stream->pending) return push(stream, std::move(task));
  }
  task();
}

void host_cuda_enqueue(cudaStream_t handle, Task task) {
  std::lock_guard<std::mutex> lock(mutex);
  push(find(handle), std::move(task));
}

void host_cuda_drain(cudaStream_t handle) {
  Stream* stream = find(handle);
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return stream->pending == 0; });
}

void host_cuda_drain_all() {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] {
    for (Stream* stream : streams)
      if (stream->pending) return false;
    return true;
  });
}

extern "C" {


void host_cuda_mark_access(const char* text, cudaStream_t stream) {
  host_cuda_record("ACCESS %s stream=%ld", text, host_cuda_stream_number(stream));
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return create(stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return create(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return create(stream); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // its queue may still have tasks
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  host_cuda_record("SYNC kind=device");
  host_cuda_drain_all();
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  host_cuda_record("SYNC kind=stream stream=%ld", host_cuda_stream_number(stream));
  host_cuda_drain(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(mutex);
  bool idle = find(stream)->pending == 0;
  host_cuda_record("QUERY kind=stream stream=%ld done=%d", find(stream)->number, idle);
  return idle ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  host_cuda_record("WAIT event=%ld stream=%ld", as_event(event)->number, host_cuda_stream_number(stream));
  std::shared_ptr<Completion> last = as_event(event)->last;
  if (last && !last->done) host_cuda_enqueue(stream, [last] { wait_until_done(last); });
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  host_cuda_record("HOST_FUNCTION stream=%ld", host_cuda_stream_number(stream));
  host_cuda_run(stream, [=] { function(argument); });
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* argument, unsigned) {
  host_cuda_record("HOST_FUNCTION stream=%ld", host_cuda_stream_number(stream));
  host_cuda_run(stream, [=] { function(stream, cudaSuccess, argument); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event{next_event++, nullptr});
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete as_event(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  host_cuda_record("RECORD event=%ld stream=%ld", as_event(event)->number, host_cuda_stream_number(stream));
  auto completion = std::make_shared<Completion>();
  as_event(event)->last = completion;
  host_cuda_run(stream, [completion] { complete(completion); });
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  bool done = is_done(as_event(event));
  host_cuda_record("QUERY kind=event event=%ld done=%d", as_event(event)->number, done);
  return done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  host_cuda_record("SYNC kind=event event=%ld", as_event(event)->number);
  if (!is_done(as_event(event))) wait_until_done(as_event(event)->last);
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (!as_event(start)->last || !as_event(end)->last) return cudaErrorInvalidResourceHandle;
  if (!is_done(as_event(start)) || !is_done(as_event(end))) return cudaErrorNotReady;
  *milliseconds = float(1e3 * (as_event(end)->last->seconds - as_event(start)->last->seconds));
  return cudaSuccess;
}

// Graphs are not supported: no stream is ever captured.
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
}
