cat /etc/hccn.conf
ldd --version
