{{- define "expertd.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "expertd.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "expertd.labels" -}}
{{ include "expertd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* A dict of options as the TOML that `expertd serve --config` reads.  Numbers come as floats: 1e+06 is no whole number there. */}}
{{- define "expertd.toml" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
{{- fail (printf "serve.%s: got the boolean %v, want the option's word in quotes: YAML reads yes, no, on and off without quotes as booleans" $name $value) }}
{{- end }}
{{ $name }} = {{ if kindIs "string" $value }}{{ $value | quote }}{{ else if eq (floor $value) (float64 $value) }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}
{{- end }}
{{- end }}

{{- /* A group's option `device` where values have none: with `auto` a pod whose GPU is not visible would serve on the CPU. */}}
{{- define "expertd.device" -}}
{{- if ne .kind "cpu" }}device: {{ .kind }}{{ end }}
{{- end }}

{{- /* How a pod is asked for its health.  Kubernetes' own gRPC probes speak no TLS. */}}
{{- define "expertd.probe" -}}
{{- if .Values.tls.secretName -}}
exec:
  command:
    - expertctl
    - health
    - 127.0.0.1:{{ .Values.service.port }}
    - --ca=/etc/expertd-tls/ca.crt
    - --server-name={{ required "tls.serverName: the name in the certificate" .Values.tls.serverName }}
    {{- if .Values.tls.clientCertificates }}
    - --cert=/etc/expertd-tls/tls.crt
    - --key=/etc/expertd-tls/tls.key
    {{- end }}
{{- else -}}
grpc: {port: {{ .Values.service.port }}}
{{- end }}
{{- end }}

{{- /* The image of a group: its kind is part of the tag, so one release may have several kinds. */}}
{{- define "expertd.image" -}}
{{- $tag := coalesce .group.imageTag .root.Values.image.tag (printf "%s-%s" (.root.Chart.AppVersion | replace "+" "_") .group.kind) -}}
{{ .root.Values.image.repository }}:{{ $tag }}
{{- end }}

{{- /* The StatefulSet of one shard: NAME-GROUP-sSHARD; its pods are the shard's copies, NAME-GROUP-sSHARD-COPY. */}}
{{- define "expertd.set" -}}
{{ include "expertd.fullname" .root }}-{{ .name }}-s{{ .shard }}
{{- end }}

{{- define "expertd.setSelector" -}}
{{ include "expertd.selector" .root }}
app.kubernetes.io/component: {{ .name }}
expertd/shard: {{ printf "%d-of-%d" (int64 .shard) (int64 .of) | quote }}
{{- end }}

{{- /* A group's affinity, and that copies of one shard, of whichever group, get different nodes. */}}
{{- define "expertd.affinity" -}}
{{- $affinity := deepCopy .group.affinity }}
{{- if ne .group.copySpread "off" }}
{{- $labels := include "expertd.selector" .root | fromYaml }}
{{- $_ := set $labels "expertd/shard" (printf "%d-of-%d" (int64 .shard) (int64 .of)) }}
{{- $term := dict "topologyKey" .group.copySpreadKey "labelSelector" (dict "matchLabels" $labels) }}
{{- $anti := default (dict) $affinity.podAntiAffinity }}
{{- $key := "requiredDuringSchedulingIgnoredDuringExecution" }}
{{- if eq .group.copySpread "preferred" }}
{{- $key = "preferredDuringSchedulingIgnoredDuringExecution" }}
{{- $term = dict "weight" 100 "podAffinityTerm" $term }}
{{- end }}
{{- $_ := set $anti $key (append (default (list) (get $anti $key)) $term) }}
{{- $_ := set $affinity "podAntiAffinity" $anti }}
{{- end }}
{{- with $affinity }}{{ toYaml . }}{{ end }}
{{- end }}
