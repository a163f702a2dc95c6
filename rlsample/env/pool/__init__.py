"""The parts of :class:`~rlsample.env.async_vector_env.AsyncVectorEnv`: shared memory, processes, and what they say."""
