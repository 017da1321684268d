#!/bin/sh
# A call typed by hand as JSON, over server reflection, with buf or grpcurl: whichever is installed.
#
#     sh client/examples/json_call.sh 127.0.0.1:50051
set -eu
address=$1

call() {  # METHOD JSON
    if command -v grpcurl >/dev/null; then
        grpcurl -plaintext -d "$2" "$address" "expertd.v1.ExpertService/$1"
    else
        buf curl --protocol grpc --http2-prior-knowledge -d "$2" "http://$address/expertd.v1.ExpertService/$1"
    fi
}

# The number that follows NAME in JSON on standard input.
number() {
    tr -d ' \n"' | sed -n "s/.*$1:\([0-9]*\).*/\1/p"
}

hidden=$(call Describe '{}' | number hiddenSize)
test -n "$hidden"
echo "hidden size $hidden"

# Four tokens drawn by the server (the same seed gives the same values), answered by a digest instead of the output.
drawn="{\"layer\": 0, \"outputForm\": \"OUTPUT_FORM_DIGEST\",
  \"hiddenStates\": {\"dtype\": \"DATA_TYPE_BF16\", \"shape\": [4, $hidden], \"synthetic\": {\"seed\": 7}},
  \"topkIds\":      {\"dtype\": \"DATA_TYPE_I32\",  \"shape\": [4, 2], \"synthetic\": {\"seed\": 7}},
  \"topkWeights\":  {\"dtype\": \"DATA_TYPE_F32\",  \"shape\": [4, 2], \"synthetic\": {\"seed\": 7}}}"
first=$(call Forward "$drawn")
second=$(call Forward "$drawn")
echo "$first"
test "$(echo "$first" | number crc32)" = "$(echo "$second" | number crc32)"
test "$(echo "$first" | number routesComputed)" = 8

# One token typed as values: expert 1 alone, with a weight of 1; the second route goes nowhere.
ones=$(yes 1 | head -n "$hidden" | paste -sd, -)
typed="{\"layer\": 0, \"outputForm\": \"OUTPUT_FORM_DIGEST\",
  \"hiddenStates\": {\"dtype\": \"DATA_TYPE_F32\", \"shape\": [1, $hidden], \"floats\": {\"values\": [$ones]}},
  \"topkIds\":      {\"dtype\": \"DATA_TYPE_I32\", \"shape\": [1, 2], \"ints\": {\"values\": [1, -1]}},
  \"topkWeights\":  {\"dtype\": \"DATA_TYPE_F32\", \"shape\": [1, 2], \"floats\": {\"values\": [1, 0.5]}}}"
third=$(call Forward "$typed")
echo "$third"
test "$(echo "$third" | number routesComputed)" = 1

# The same token as e4m3: numbers that e4m3 holds, and a scale for 128 of them, with which they are multiplied.
halves=$(yes 0.5 | head -n "$hidden" | paste -sd, -)
scales=$(yes 2 | head -n "$(((hidden + 127) / 128))" | paste -sd, -)
e4m3="{\"layer\": 0, \"outputForm\": \"OUTPUT_FORM_DIGEST\", \"outputDtype\": \"DATA_TYPE_F32\",
  \"hiddenStates\": {\"dtype\": \"DATA_TYPE_E4M3\", \"shape\": [1, $hidden], \"floats\": {\"values\": [$halves]},
                   \"scales\": {\"block\": 128, \"floats\": {\"values\": [$scales]}}},
  \"topkIds\":      {\"dtype\": \"DATA_TYPE_I32\", \"shape\": [1, 2], \"ints\": {\"values\": [1, -1]}},
  \"topkWeights\":  {\"dtype\": \"DATA_TYPE_F32\", \"shape\": [1, 2], \"floats\": {\"values\": [1, 0.5]}}}"
fourth=$(call Forward "$e4m3")
test "$(echo "$fourth" | number crc32)" = "$(echo "$third" | number crc32)"
