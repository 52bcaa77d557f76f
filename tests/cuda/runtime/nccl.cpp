// NCCL between processes of one machine. Collectives run in the order of their stream and exchange real data.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "channel.h"
#include "record.h"
#include "reduction.h"
#include "streams.h"

struct ncclComm {
  ncclComm(const std::string& name, int size, int rank) : channel(name, size, rank) {}
  Channel channel;
  int splits = 0;
  // NCCL runs the calls of a communicator in the order in which the host made them, also on several streams.
  std::atomic<long> submitted{0}, finished{0};

  // Queues a task for its turn among the tasks of this communicator.
  void enqueue(cudaStream_t stream, Task task) {
    long turn = submitted++;
    host_cuda_enqueue(stream, [this, turn, task] {
      if (channel.wait([&] { return finished == turn; })) task();
      finished++;
    });
  }
};

namespace {

constexpr int NO_ROOT = -1;
constexpr size_t NAME_BYTES = 6;  // of the unique id, in the names of files and in the log

struct Transfer {
  bool sends;
  char* data;
  size_t bytes;
  int peer;
  size_t done = 0;
};

// Calls between ncclGroupStart and ncclGroupEnd.
struct Group {
  struct Part {
    ncclComm_t comm;
    cudaStream_t stream;
    std::vector<Transfer> transfers;
    std::vector<Task> collectives;
  };
  int depth = 0;
  std::vector<Part> parts;

  Part& part(ncclComm_t comm, cudaStream_t stream) {
    for (Part& part : parts)
      if (part.comm == comm && part.stream == stream) return part;
    parts.push_back({comm, stream, {}, {}});
    return parts.back();
  }
};

thread_local Group group;

// Factors of scaled sums: a number, or the address of one that is read when the collective runs.
struct Factor {
  ncclDataType_t type;
  const void* address;
  double number;
};
std::map<int, Factor>& factors = *new std::map<int, Factor>;
std::mutex& factors_mutex = *new std::mutex;

double factor_of(ncclRedOp_t reduction) {
  std::lock_guard<std::mutex> lock(factors_mutex);
  auto entry = factors.find(reduction);
  if (entry == factors.end()) return 1.0;
  return entry->second.address ? number_at(entry->second.address, entry->second.type) : entry->second.number;
}

std::string name_of(const ncclUniqueId& id) {
  std::string name;
  char digits[3];
  for (size_t i = 0; i < NAME_BYTES; i++) {
    snprintf(digits, sizeof digits, "%02x", (unsigned char)id.internal[i]);
    name += digits;
  }
  return name;
}

ncclResult_t create(ncclComm_t* comm, const std::string& name, int size, int rank) {
  host_cuda_record("NCCL name=init comm=%s size=%d rank=%d", name.c_str(), size, rank);
  *comm = new ncclComm(name, size, rank);
  return ncclSuccess;
}

// Moves all messages of a group, in any order in which there is space or data.
void exchange(Channel& channel, std::vector<Transfer>& transfers) {
  std::vector<Transfer*> to_self, from_self;
  for (Transfer& transfer : transfers)
    if (transfer.peer == channel.rank) (transfer.sends ? to_self : from_self).push_back(&transfer);
  for (size_t i = 0; i < to_self.size() && i < from_self.size(); i++)
    memmove(from_self[i]->data, to_self[i]->data, to_self[i]->bytes);
  channel.wait([&] {
    bool finished = true;
    bool blocked_send[MAX_RANKS] = {}, blocked_receive[MAX_RANKS] = {};  // messages of a pair keep their order
    for (Transfer& transfer : transfers) {
      if (transfer.peer == channel.rank) continue;
      bool& blocked = (transfer.sends ? blocked_send : blocked_receive)[transfer.peer];
      while (transfer.done < transfer.bytes && !blocked) {
        size_t moved = transfer.sends
                           ? channel.send_some(transfer.peer, transfer.data, transfer.bytes, transfer.done)
                           : channel.receive_some(transfer.peer, transfer.data, transfer.bytes, transfer.done);
        transfer.done += moved;
        blocked = moved == 0;
      }
      finished = finished && transfer.done == transfer.bytes;
    }
    return finished;
  });
}

void submit(Group::Part& part) {
  Channel& channel = part.comm->channel;
  if (!part.transfers.empty()) {
    auto transfers = std::make_shared<std::vector<Transfer>>(std::move(part.transfers));
    part.comm->enqueue(part.stream, [&channel, transfers] { exchange(channel, *transfers); });
  }
  for (Task& task : part.collectives) part.comm->enqueue(part.stream, std::move(task));
}

ncclResult_t transfer(bool sends, void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  size_t bytes = count * width_of(type);
  host_cuda_record("NCCL name=%s comm=%s size=%d peer=%d bytes=%zu %s=%p,%zu stream=%ld", sends ? "send" : "receive",
                   comm->channel.name.c_str(), comm->channel.size, peer, bytes, sends ? "read" : "written", data, bytes,
                   host_cuda_stream_number(stream));
  Group single;
  Group::Part& part = (group.depth ? group : single).part(comm, stream);
  part.transfers.push_back({sends, static_cast<char*>(data), bytes, peer});
  if (!group.depth) submit(part);
  return ncclSuccess;
}

struct Call {
  const char* name;
  const void* input;
  void* output;
  size_t count;  // numbers per rank, as the caller gives them
  ncclDataType_t type;
  ncclRedOp_t reduction;
  int root;
  size_t read_count, written_count;  // numbers in the buffers of this rank
  bool reduces;
};

// Runs `exchange_data` in the stream's order, once all ranks have called the same collective.
ncclResult_t collective(const Call& call, ncclComm_t comm, cudaStream_t stream, std::function<void()> exchange_data) {
  size_t width = width_of(call.type);
  if (!width) return ncclInvalidArgument;
  Channel& channel = comm->channel;
  host_cuda_record("NCCL name=%s comm=%s size=%d bytes=%zu read=%p,%zu written=%p,%zu type=%s%s%s stream=%ld", call.name,
                   channel.name.c_str(), channel.size, width * std::max(call.read_count, call.written_count),
                   call.input, width * call.read_count, call.output, width * call.written_count, name_of(call.type),
                   call.reduces ? " reduction=" : "", call.reduces ? name_of(call.reduction) : "",
                   host_cuda_stream_number(stream));
  Operation operation = {0, call.count, call.type, call.root, {}, {}};
  snprintf(operation.name, sizeof operation.name, "%s", call.name);
  if (call.reduces) snprintf(operation.reduction, sizeof operation.reduction, "%s", name_of(call.reduction));
  Task task = [&channel, operation, exchange_data] {
    if (channel.agree(operation)) exchange_data();
  };
  if (group.depth)
    group.part(comm, stream).collectives.push_back(std::move(task));
  else
    comm->enqueue(stream, std::move(task));
  return ncclSuccess;
}

// The sum (or product, ...) over ranks of the numbers at `offset` of each rank's slot.
std::vector<char> reduced(Channel& channel, size_t offset, size_t count, const Call& call) {
  const char* first = channel.slot(0) + offset;
  std::vector<char> total(first, first + count * width_of(call.type));
  for (int rank = 1; rank < channel.size; rank++)
    reduce_into(total.data(), channel.slot(rank) + offset, count, call.type, call.reduction);
  if (call.reduction == ncclAvg) multiply_by(total.data(), count, call.type, 1.0 / channel.size);
  return total;
}

// Copies numbers into this rank's slot, times the factor of a scaled sum.
void publish(Channel& channel, size_t offset, const char* numbers, size_t count, const Call& call) {
  char* target = channel.slot(channel.rank) + offset;
  memcpy(target, numbers, count * width_of(call.type));
  if (call.reduces && call.reduction >= ncclNumOps) multiply_by(target, count, call.type, factor_of(call.reduction));
}

// Each rank gets the reduction of all inputs; `keeps`: whether this rank stores it.
void reduce_all(Channel& channel, const Call& call, bool keeps) {
  size_t width = width_of(call.type), most = Channel::SLOT_BYTES / width;
  for (size_t at = 0; at < call.count; at += most) {
    size_t count = std::min(most, call.count - at);
    publish(channel, 0, static_cast<const char*>(call.input) + at * width, count, call);
    if (!channel.barrier()) return;
    if (keeps) {
      std::vector<char> total = reduced(channel, 0, count, call);
      memcpy(static_cast<char*>(call.output) + at * width, total.data(), total.size());
    }
    if (!channel.barrier()) return;
  }
}

// Each rank has a part for every rank; rank r gets all parts numbered r, reduced or one after the other.
void scatter_parts(Channel& channel, const Call& call) {
  size_t width = width_of(call.type), most = Channel::SLOT_BYTES / channel.size / width;
  std::vector<char> output(width * call.written_count);  // the output may overlap the input
  for (size_t at = 0; at < call.count; at += most) {
    size_t count = std::min(most, call.count - at);
    for (int rank = 0; rank < channel.size; rank++)
      publish(channel, rank * most * width, static_cast<const char*>(call.input) + (rank * call.count + at) * width,
              count, call);
    if (!channel.barrier()) return;
    size_t offset = channel.rank * most * width;
    if (call.reduces) {
      std::vector<char> total = reduced(channel, offset, count, call);
      memcpy(output.data() + at * width, total.data(), total.size());
    } else {
      for (int rank = 0; rank < channel.size; rank++)
        memcpy(output.data() + (rank * call.count + at) * width, channel.slot(rank) + offset, count * width);
    }
    if (!channel.barrier()) return;
  }
  memcpy(call.output, output.data(), output.size());
}

// All ranks get the numbers of `root`, or of every rank one after the other.
void gather_all(Channel& channel, const Call& call) {
  size_t width = width_of(call.type), most = Channel::SLOT_BYTES / width;
  for (size_t at = 0; at < call.count; at += most) {
    size_t count = std::min(most, call.count - at);
    if (call.root == NO_ROOT || call.root == channel.rank)
      publish(channel, 0, static_cast<const char*>(call.input) + at * width, count, call);
    if (!channel.barrier()) return;
    char* output = static_cast<char*>(call.output);
    if (call.root != NO_ROOT) {
      memcpy(output + at * width, channel.slot(call.root), count * width);
    } else {
      for (int rank = 0; rank < channel.size; rank++)
        memcpy(output + (rank * call.count + at) * width, channel.slot(rank), count * width);
    }
    if (!channel.barrier()) return;
  }
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  memset(id, 0, sizeof *id);
  for (size_t i = 0; i < NAME_BYTES; i++) id->internal[i] = (char)random();
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  return create(comm, name_of(id), size, rank);
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return create(comm, name_of(id), size, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return create(comm, name_of(ids[0]), size, rank);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part, ncclConfig_t*) {
  // A channel for this call alone, because collectives may still use the one of `comm`.
  std::string name = comm->channel.name + "-" + std::to_string(comm->splits++);
  Channel channel(name, comm->channel.size, comm->channel.rank);
  int mine[2] = {color, key};
  memcpy(channel.slot(channel.rank), mine, sizeof mine);
  channel.barrier();
  int size = 0, rank = 0;
  for (int other = 0; other < channel.size; other++) {
    int theirs[2];
    memcpy(theirs, channel.slot(other), sizeof theirs);
    if (theirs[0] != color) continue;
    size++;
    rank += theirs[1] < key || (theirs[1] == key && other < channel.rank);
  }
  *part = nullptr;
  return color == NCCL_SPLIT_NOCOLOR ? ncclSuccess : create(part, name + "-" + std::to_string(color), size, rank);
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* size) {
  *size = comm->channel.size;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->channel.rank;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

// As in NCCL 2.29, waits for all ranks of the communicator: a rank whose peers are in a collective waits for ever.
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  host_cuda_record("NCCL name=finalize comm=%s", comm->channel.name.c_str());
  host_cuda_drain_all();
  bool all_here = comm->channel.finalize();
  host_cuda_record("NCCL name=finalized comm=%s all_ranks=%d", comm->channel.name.c_str(), all_here);
  return all_here ? ncclSuccess : ncclInternalError;
}
// The memory of a communicator is not freed: a queued task may still use it.
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  host_cuda_record("NCCL name=destroy comm=%s", comm->channel.name.c_str());
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  host_cuda_record("NCCL name=abort comm=%s", comm->channel.name.c_str());
  comm->channel.abort();
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t error) {
  return error == ncclSuccess ? "no error" : "error of NCCL on host memory";
}
const char* ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclGroupStart() {
  group.depth++;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (--group.depth) return ncclSuccess;
  std::vector<Group::Part> parts = std::move(group.parts);
  group.parts.clear();
  for (Group::Part& part : parts) submit(part);
  return ncclSuccess;
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return transfer(true, const_cast<void*>(data), count, type, peer, comm, stream);
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return transfer(false, data, count, type, peer, comm, stream);
}

ncclResult_t ncclAllReduce(const void* input, void* output, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                           ncclComm_t comm, cudaStream_t stream) {
  Call call = {"all_reduce", input, output, count, type, reduction, NO_ROOT, count, count, true};
  return collective(call, comm, stream, [=] { reduce_all(comm->channel, call, true); });
}
ncclResult_t ncclReduce(const void* input, void* output, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                        int root, ncclComm_t comm, cudaStream_t stream) {
  bool keeps = comm->channel.rank == root;
  Call call = {"reduce", input, output, count, type, reduction, root, count, keeps ? count : 0, true};
  return collective(call, comm, stream, [=] { reduce_all(comm->channel, call, keeps); });
}
ncclResult_t ncclBroadcast(const void* input, void* output, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  size_t read = comm->channel.rank == root ? count : 0;
  Call call = {"broadcast", input, output, count, type, ncclSum, root, read, count, false};
  return collective(call, comm, stream, [=] { gather_all(comm->channel, call); });
}
ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}
ncclResult_t ncclAllGather(const void* input, void* output, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  size_t written = count * comm->channel.size;
  Call call = {"all_gather", input, output, count, type, ncclSum, NO_ROOT, count, written, false};
  return collective(call, comm, stream, [=] { gather_all(comm->channel, call); });
}
ncclResult_t ncclReduceScatter(const void* input, void* output, size_t count, ncclDataType_t type,
                               ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
  size_t read = count * comm->channel.size;
  Call call = {"reduce_scatter", input, output, count, type, reduction, NO_ROOT, read, count, true};
  return collective(call, comm, stream, [=] { scatter_parts(comm->channel, call); });
}
ncclResult_t ncclAlltoAll(const void* input, void* output, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
  size_t all = count * comm->channel.size;
  Call call = {"all_to_all", input, output, count, type, ncclSum, NO_ROOT, all, all, false};
  return collective(call, comm, stream, [=] { scatter_parts(comm->channel, call); });
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* reduction, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t) {
  static int next = ncclNumOps;
  std::lock_guard<std::mutex> lock(factors_mutex);
  bool on_device = residence == ncclScalarDevice;
  factors[next] = {type, on_device ? scalar : nullptr, on_device ? 1.0 : number_at(scalar, type)};
  *reduction = (ncclRedOp_t)next++;
  return ncclSuccess;
}
// Factors are kept: torch destroys the operation before the queued collective runs.
ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

ncclResult_t ncclMemAlloc(void** address, size_t bytes) { return (ncclResult_t)cudaMalloc(address, bytes); }
ncclResult_t ncclMemFree(void* address) { return (ncclResult_t)cudaFree(address); }
}
