{{- /* Values that a schema cannot refuse: they render, and the pods would start. */}}
{{- define "expertd.checks" -}}
{{- include "expertd.checkOptions" . }}
{{- $groups := dict }}
{{- range $name, $group := .Values.groups }}
{{- $_ := set $groups $name (mergeOverwrite (deepCopy $.Values.groupDefaults) $group) }}
{{- end }}
{{- range $name, $group := $groups }}
{{- include "expertd.checkGroup" (dict "root" $ "name" $name "group" $group) }}
{{- end }}
{{- include "expertd.checkTag" (dict "root" $ "groups" $groups) }}
{{- include "expertd.checkOverlap" $groups }}
{{- include "expertd.checkCoverage" $groups }}
{{- include "expertd.checkRolling" $groups }}
{{- end }}

{{- /* Names of options: Helm would print all that there are, if the schema had them. */}}
{{- define "expertd.checkOptions" -}}
{{- $known := .Files.Get "options.yaml" | fromYaml }}
{{- $given := dict "serve" .Values.serve "groupDefaults.serve" .Values.groupDefaults.serve }}
{{- range $name, $group := .Values.groups }}{{ $_ := set $given (printf "groups.%s.serve" $name) (default (dict) $group.serve) }}{{ end }}
{{- range $where, $options := $given }}{{ range $option, $_ := $options }}
{{- if has $option $known.chart }}
{{- fail (printf "%s.%s: the chart sets this option itself; see docs/deploy.md" $where $option) }}
{{- end }}
{{- if not (has $option $known.values) }}
{{- fail (printf "%s.%s: no option of expertd serve; see docs/options.md" $where $option) }}
{{- end }}
{{- end }}{{ end }}
{{- end }}

{{- define "expertd.checkGroup" -}}
{{- $shards := .group.shards }}
{{- include "expertd.checkServed" . }}
{{- if gt (add $shards.first $shards.count) (int64 $shards.of) }}
{{- fail (printf "groups.%s.shards: got first %v and count %v of %v, want first + count <= of" .name $shards.first $shards.count $shards.of) }}
{{- end }}
{{- $longest := include "expertd.set" (dict "root" .root "name" .name "shard" (sub (add $shards.first $shards.count) 1)) }}
{{- if gt (len $longest) 52 }}
{{- fail (printf "groups.%s: the StatefulSet %s has %d letters, and Kubernetes takes 52; want a shorter name of the release or the group" .name $longest (len $longest)) }}
{{- end }}
{{- if .root.Values.admin.enabled }}
{{- if not (and .root.Values.tls.secretName .root.Values.callersSecret) }}
{{- fail "admin.enabled: who reaches it could change what is served; want tls.secretName and callersSecret, whose callers need the right admin" }}
{{- end }}
{{- if not .group.cacheSize }}
{{- fail (printf "admin.enabled: groups.%s has no cacheSize, want one: a pod that is replaced remembers there what it holds" .name) }}
{{- end }}
{{- if .group.autoscaling.enabled }}
{{- fail (printf "admin.enabled: groups.%s.autoscaling takes pods away, and what only they hold by then; want one of the two" .name) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* What a group serves is one thing, and it is there. */}}
{{- define "expertd.checkServed" -}}
{{- $options := merge (dict) .group.serve .root.Values.serve }}
{{- $models := .root.Values.models }}
{{- if and $options.checkpoint $options.synthetic }}
{{- fail (printf "groups.%s: got checkpoint %q and synthetic %q, want one of them: set serve.synthetic to null" .name $options.checkpoint $options.synthetic) }}
{{- end }}
{{- if not (or $options.checkpoint $options.synthetic) }}
{{- fail (printf "groups.%s: got neither checkpoint nor synthetic, want one of them in serve or in groups.%s.serve" .name .name) }}
{{- end }}
{{- if and $options.checkpoint (hasPrefix (printf "%s/" (trimSuffix "/" $models.mountPath)) $options.checkpoint) (not $models.volume) }}
{{- fail (printf "groups.%s: the checkpoint %q is below models.mountPath, and models.volume is empty; want the volume that has it" .name $options.checkpoint) }}
{{- end }}
{{- if eq "yes" (toString (get $options "traces")) }}
{{- fail (printf "groups.%s: serve.traces: the images have no exporter of spans, and pods may connect to nobody; want it without traces" .name) }}
{{- end }}
{{- end }}

{{- /* Each group's StatefulSets replace their pods by themselves, so a shard with one copy in each of several groups would be away
during an upgrade. */}}
{{- define "expertd.checkRolling" -}}
{{- $groups := . }}
{{- range $left := $groups }}
{{- range $shard := untilStep (int $left.shards.first) (int (add $left.shards.first $left.shards.count)) 1 }}
{{- $copies := 0 }}{{ $rolling := list }}
{{- range $name, $right := $groups }}
{{- $r := $right.shards }}
{{- if and (lt (mul $shard $r.of) (mul (add $r.first $r.count) $left.shards.of)) (lt (mul $r.first $left.shards.of) (mul (add $shard 1) $r.of)) }}
{{- $copies = add $copies $right.copies }}
{{- if ne $right.updateStrategy "OnDelete" }}{{ $rolling = append $rolling (printf "groups.%s" $name) }}{{ end }}
{{- end }}
{{- end }}
{{- if and (gt (len $rolling) 1) (le (int64 $copies) (int64 (len $rolling))) }}
{{- fail (printf "%s have one copy each of the experts from %d/%d to %d/%d of each layer, and an upgrade replaces these at the same time; want copies: 2 in one of the groups, or updateStrategy: OnDelete in all but one" (join " and " $rolling) $shard (int64 $left.shards.of) (add $shard 1) (int64 $left.shards.of)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* One tag is one image, and one image is of one kind. */}}
{{- define "expertd.checkTag" -}}
{{- $kinds := list }}
{{- range $name, $group := .groups }}
{{- if not $group.imageTag }}{{ $kinds = append $kinds $group.kind | uniq }}{{ end }}
{{- end }}
{{- if and .root.Values.image.tag (gt (len $kinds) 1) }}
{{- fail (printf "image.tag: got %q for groups of the kinds %s, which need an image each; want groups.NAME.imageTag instead" .root.Values.image.tag (join ", " $kinds)) }}
{{- end }}
{{- end }}

{{- /* Two groups with the same `of` have the same shards or none in common.  With another `of` they meet in parts of shards, unless
they serve the same range. */}}
{{- define "expertd.checkOverlap" -}}
{{- $groups := . }}
{{- range $a, $left := $groups }}{{ range $b, $right := $groups }}
{{- $l := $left.shards }}{{ $r := $right.shards }}
{{- if and (lt $a $b) (ne (int64 $l.of) (int64 $r.of)) }}
{{- $l0 := mul $l.first $r.of }}{{ $l1 := mul (add $l.first $l.count) $r.of }}
{{- $r0 := mul $r.first $l.of }}{{ $r1 := mul (add $r.first $r.count) $l.of }}
{{- if and (lt $l0 $r1) (lt $r0 $l1) (or (ne $l0 $r0) (ne $l1 $r1)) }}
{{- fail (printf "groups.%s serves experts from %d/%d to %d/%d of each layer, groups.%s from %d/%d to %d/%d: some experts would have more copies than others; want ranges that are equal or do not meet, or the same `of`" $a (int64 $l.first) (int64 $l.of) (add $l.first $l.count) (int64 $l.of) $b (int64 $r.first) (int64 $r.of) (add $r.first $r.count) (int64 $r.of)) }}
{{- end }}
{{- end }}
{{- end }}{{ end }}
{{- end }}

{{- /* All experts of a layer have a group: where a group ends, and at 0, one must go on. */}}
{{- define "expertd.checkCoverage" -}}
{{- $groups := . }}
{{- $ofs := list }}
{{- $ends := list (dict "at" 0 "of" 1) }}
{{- range $groups }}
{{- $ofs = append $ofs (int64 .shards.of) | uniq }}
{{- $ends = append $ends (dict "at" (add .shards.first .shards.count) "of" (int64 .shards.of)) }}
{{- end }}
{{- range $end := $ends }}
{{- if lt (int64 $end.at) (int64 $end.of) }}
{{- $covered := false }}
{{- /* Where the missing range ends: the nearest group behind it, or the last expert. */}}
{{- $to := dict "at" 1 "of" 1 }}
{{- range $groups }}
{{- $at := mul $end.at .shards.of }}
{{- $first := mul .shards.first $end.of }}
{{- $last := mul (add .shards.first .shards.count) $end.of }}
{{- if and (le $first $at) (lt $at $last) }}{{ $covered = true }}{{ end }}
{{- if and (gt $first $at) (lt (mul .shards.first $to.of) (mul $to.at .shards.of)) }}
{{- $to = dict "at" .shards.first "of" .shards.of }}
{{- end }}
{{- end }}
{{- if not $covered }}
{{- $missing := printf "the experts from %d/%d to %d/%d of each layer" (int64 $end.at) (int64 $end.of) (int64 $to.at) (int64 $to.of) }}
{{- if eq (len $ofs) 1 }}
{{- $of := index $ofs 0 }}
{{- $first := div (mul $end.at $of) $end.of }}
{{- $last := sub (div (mul $to.at $of) $to.of) 1 }}
{{- $missing = ternary (printf "shard %d of %d" $first $of) (printf "shards %d to %d of %d" $first $last $of) (eq $first $last) }}
{{- end }}
{{- fail (printf "groups: no group serves %s (shards count from 0); want groups that together serve all of them" $missing) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
