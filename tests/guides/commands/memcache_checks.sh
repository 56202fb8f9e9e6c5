echo 3 > /proc/sys/vm/drop_caches
echo 1 > /proc/sys/vm/compact_memory
python3 mem_scan.py
python3 mem_scan.py -m 2
for i in {0..7}; do npu-smi set -t custom-op-secverify-enable -i $i -d 1; done;
for i in {0..7}; do npu-smi set -t custom-op-secverify-mode -i $i -d 0; done;
lsblk /dev/nvme1n1
mount | grep nvme1n1
blkid /dev/nvme1n1
dd if=/dev/zero of=/data/boostio_disk.img bs=1G count=640 status=progress
LOOP_DEV=$(losetup --find --show --direct-io=on /data/boostio_disk.img)
echo "${LOOP_DEV}"
