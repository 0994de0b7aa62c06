# The broker alone: the database is named by QUEEN_PG_URL.
FROM python:3.13-slim
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY bench bench
COPY migrations migrations
COPY queen_pg queen_pg
RUN pip install --no-cache-dir . && useradd --system queen
USER queen
ENV HOST=0.0.0.0
EXPOSE 6632
ENTRYPOINT ["queen-pg"]
CMD ["serve"]
