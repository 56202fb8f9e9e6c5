"""Services of the stores, for trial and test on one host: ``service(backend)`` starts, stops and shows one."""
