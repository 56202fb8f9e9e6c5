pip install memfabric-hybrid
pip install memcache-hybrid
pip show memcache_hybrid
