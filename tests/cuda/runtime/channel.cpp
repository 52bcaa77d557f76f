// Shared memory of the ranks of a communicator: barriers, agreement on operations, and mailboxes between pairs.
#include "channel.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "record.h"

namespace {

constexpr size_t MAIL_BYTES = 256 << 10;
constexpr uint64_t MAIL_CHUNKS = 4;  // of a pair of ranks
constexpr int POLLS_BEFORE_SLEEP = 50;
constexpr int SLEEP_MICROSECONDS = 50;
constexpr size_t PAGE_BYTES = 4096;

int number_in_job(int rank) {  // of this process, for reports
  const char* text = getenv("RANK");
  return text ? atoi(text) : rank;
}

[[noreturn]] void fail(const std::string& text) {
  host_cuda_record("NCCL_ERROR text=%s", text.c_str());
  fprintf(stderr, "NCCL on host memory: %s\n", text.c_str());
  fflush(stderr);
  ::abort();
}

}  // namespace

struct Channel::Mailbox {
  std::atomic<uint64_t> sent, taken;
  size_t sizes[MAIL_CHUNKS], totals[MAIL_CHUNKS];
};

struct Channel::Header {
  std::atomic<int> joined, arrived, generation, finalized;
  int numbers[MAX_RANKS];                // of the ranks in the job
  Operation operations[2][MAX_RANKS];    // of the current and the previous collective
  Mailbox mailboxes[MAX_RANKS][MAX_RANKS];
};

bool Operation::equals(const Operation& other) const {
  return sequence == other.sequence && count == other.count && type == other.type && root == other.root &&
         !strcmp(name, other.name) && !strcmp(reduction, other.reduction);
}

std::string Operation::text() const {
  std::string result = std::string(name) + " of " + std::to_string(count) + " numbers of type " + std::to_string(type);
  if (*reduction) result += std::string(", ") + reduction;
  if (root >= 0) result += ", root " + std::to_string(root);
  return result;
}

Channel::Channel(const std::string& name, int size, int rank) : name(name), size(size), rank(rank) {
  if (size > MAX_RANKS) fail("a communicator has at most " + std::to_string(MAX_RANKS) + " ranks");
  const char* folder = getenv("HOST_CUDA_SHARED");
  std::string path = std::string(folder ? folder : "/dev/shm") + "/host-cuda-" + name;
  size_t header = (sizeof(Header) + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
  size_t bytes = header + SLOT_BYTES * size + MAIL_BYTES * MAIL_CHUNKS * size * size;
  int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, (off_t)bytes)) fail("cannot create " + path);
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) fail("cannot map " + path);
  header_ = static_cast<Header*>(mapped);
  slots_ = static_cast<char*>(mapped) + header;
  mail_ = slots_ + SLOT_BYTES * size;
  header_->numbers[rank] = number_in_job(rank);
  header_->joined++;
  wait([&] { return header_->joined == size; });
  unlink(path.c_str());  // all have it open; only one rank's call succeeds
}

bool Channel::wait(const std::function<bool()>& condition) const {
  for (int polls = 0; !condition(); polls++) {
    if (aborted_) return false;
    if (polls > POLLS_BEFORE_SLEEP) usleep(SLEEP_MICROSECONDS);
  }
  return true;
}

bool Channel::barrier() {
  int generation = header_->generation;
  if (++header_->arrived == size) {
    header_->arrived = 0;
    header_->generation++;
    return !aborted_;
  }
  return wait([&] { return header_->generation != generation; });
}

bool Channel::agree(Operation operation) {
  operation.sequence = ++sequence_;
  Operation* operations = header_->operations[sequence_ % 2];
  operations[rank] = operation;
  if (!barrier()) return false;
  for (int other = 0; other < size; other++) {
    if (operation.equals(operations[other])) continue;
    int first = std::min(rank, other), second = std::max(rank, other);
    fail("collective " + std::to_string(sequence_) + " of communicator " + name + " differs between ranks: rank " +
         std::to_string(header_->numbers[first]) + " calls " + operations[first].text() + "; rank " +
         std::to_string(header_->numbers[second]) + " calls " + operations[second].text());
  }
  return true;
}

bool Channel::finalize() {
  header_->finalized++;
  return wait([&] { return header_->finalized == size; });
}

Channel::Mailbox& Channel::mailbox(int from, int to) const { return header_->mailboxes[from][to]; }

char* Channel::chunk(int from, int to, uint64_t number) const {
  return mail_ + MAIL_BYTES * (MAIL_CHUNKS * (from * size + to) + number % MAIL_CHUNKS);
}

size_t Channel::send_some(int peer, const char* data, size_t bytes, size_t at) {
  Mailbox& box = mailbox(rank, peer);
  uint64_t number = box.sent;
  if (number - box.taken == MAIL_CHUNKS) return 0;
  size_t part = std::min(MAIL_BYTES, bytes - at);
  memcpy(chunk(rank, peer, number), data + at, part);
  box.sizes[number % MAIL_CHUNKS] = part;
  box.totals[number % MAIL_CHUNKS] = bytes;
  box.sent++;
  return part;
}

size_t Channel::receive_some(int peer, char* data, size_t bytes, size_t at) {
  Mailbox& box = mailbox(peer, rank);
  uint64_t number = box.taken;
  if (box.sent == number) return 0;
  if (box.totals[number % MAIL_CHUNKS] != bytes)
    fail("rank " + std::to_string(header_->numbers[rank]) + " receives " + std::to_string(bytes) + " bytes from rank " +
         std::to_string(header_->numbers[peer]) + ", which sends " + std::to_string(box.totals[number % MAIL_CHUNKS]));
  size_t part = box.sizes[number % MAIL_CHUNKS];
  memcpy(data + at, chunk(peer, rank, number), part);
  box.taken++;
  return part;
}
