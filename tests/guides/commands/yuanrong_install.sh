pip install openyuanrong-datasystem
python -c "import yr.datasystem; print('ready')"
dscli --version
