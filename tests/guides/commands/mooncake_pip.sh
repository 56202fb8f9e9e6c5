python3 -m pip install mooncake-transfer-engine-npu==0.3.11.post1 --extra-index-url <your package index mirror>
