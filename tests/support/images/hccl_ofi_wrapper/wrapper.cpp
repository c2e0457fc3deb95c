// In place of Habana's wrapper: one function of libfabric's, so that building and loading it needs libfabric.
#include <rdma/fabric.h>

extern "C" unsigned w_fi_version() { return fi_version(); }
