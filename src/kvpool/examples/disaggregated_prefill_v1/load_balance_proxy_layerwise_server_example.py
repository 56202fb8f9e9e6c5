"""The proxy that asks decode first, with the flags of the deployment guide: the same as `kvpool proxy --mode decode-first`."""

import sys

from kvpool.proxy.command import main

if __name__ == "__main__":
    sys.exit(main(mode="decode-first"))
