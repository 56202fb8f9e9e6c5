pip uninstall -y memfabric_hybrid
git clone -b release/1.2 "$MEMFABRIC_REPOSITORY"
cd memfabric_hybrid
bash script/build_and_pack_run.sh
bash output/memfabric_hybrid-1.2.0_linux_aarch64.run

git clone "$MEMCACHE_REPOSITORY"
cd memcache
git submodule update --recursive --init
git -c submodule.3rdparty/memfabric_hybrid.branch=release/1.2 \
    submodule update --remote --recursive 3rdparty/memfabric_hybrid
bash script/build_and_pack_run.sh --build_mode RELEASE
bash output/memcache_hybrid-*_linux_aarch64.run

python -c "import site; print(site.getsitepackages())"
clang --version
ls "$(clang --print-resource-dir)/include/omp.h"
apt-get update
apt-get install -y clang libomp-dev
