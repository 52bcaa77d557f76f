// Forks: torch forbids CUDA in a process that was forked after its parent counted the devices. The runtime has no such
// limit, so torch's handlers of forks are not registered.
#include <dlfcn.h>

#include <cstring>

extern "C" int __register_atfork(void (*prepare)(), void (*parent)(), void (*child)(), void* library) {
  using Register = int (*)(void (*)(), void (*)(), void (*)(), void*);
  static const Register next = (Register)dlsym(RTLD_NEXT, "__register_atfork");
  Dl_info caller;
  if (child && dladdr((void*)child, &caller) && strstr(caller.dli_fname, "libtorch_python")) return 0;
  return next(prepare, parent, child, library);
}
