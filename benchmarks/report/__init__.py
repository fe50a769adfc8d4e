"""One page from the files of `torchsparsekv eval` and `bench`: every figure beside what it was measured on."""
