"""Put German and Chinese words of a page into the English ones that headings and sentences are known by."""

from __future__ import annotations

import re

# in the order in which they are looked for: longer ones first
_CHINESE = {
    "\uff0c": ", ", "\u3002": ". ", "\uff1b": "; ", "\uff1a": ": ", "\uff08": " (", "\uff09": ") ", "\u3001": " and ",
    "\uff01": "! ", "\uff05": "%",
    "全局批大小": "global batch size", "全局批次": "global batch size", "全局": "global ",
    "总批": "global batch ", "总": "total ",
    "批处理大小": "batch size", "批次大小": "batch size", "批量大小": "batch size", "批大小": "batch size",
    "批尺寸": "batch size", "批量": "batch size", "批次": "batch size", "微批": "micro batch ", "每卡": "per gpu ",
    "每个": "per ", "每步时间": "step time", "每步耗时": "step time",
    "单步时间": "step time", "单步耗时": "step time", "单步": "step ", "每步": "per step ", "迭代时间": "step time",
    "步时": "step time", "卡数": "gpus", "显卡数": "gpus", "设备数": "gpus", "数量": "", "节点数": "nodes",
    "节点": " nodes ",
    "吞吐率": "throughput", "吞吐量": "throughput", "吞吐": "throughput ", "加速比": "speedup", "加速": "speedup ",
    "扩展效率": "scaling efficiency", "并行效率": "scaling efficiency", "线性度": "scaling efficiency",
    "效率": "efficiency",
    "序列长度": "sequence length", "上下文长度": "context length", "训练时间": "training time",
    "训练时长": "training time",
    "训练耗时": "training time", "耗时": "time", "时间": "time", "验证集": "val ", "验证": "val ", "测试": "test ",
    "训练损失": "train loss", "损失": " loss ", "困惑度": " perplexity ", "准确率": " accuracy ",
    "正确率": " accuracy ",
    "数据类型": "data type", "数值精度": "precision", "训练精度": "precision", "精度": " precision ",
    "模型": " model ",
    "方法": " method", "方案": " method", "策略": " strategy", "框架": " framework", "配置": " configuration",
    "实现": " implementation", "版本": " version ", "硬件": "hardware", "显卡": " gpus ", "设备": " device ",
    "显存不足": " OOM ",
    "爆显存": " OOM ", "状态": "status", "备注": "notes", "来源": "source", "基线": " baseline ",
    "基准": " baseline ",
    "参考": " reference ", "对照": " reference ", "原版": " original ", "原始": " original ", "官方": " upstream ",
    "本框架": " ours ", "本文": " ours ", "我们的": " ours ", "我们": " we ", "本项目": " ours ", "本仓库": " ours ",
    "前者": " the former ", "后者": " the latter ", "其余": " the others ", "其他": " the others ",
    "其它": " the others ",
    "均": " all ", "所有": " all ", "全部": " all ", "都": " all ", "两者": " both ", "而": ", while ",
    "但": ", but ",
    "第一行": " first row ", "第二行": " second row ", "第三行": " third row ", "最后一行": " last row ",
    "非实测": " not measured ", "尚未实测": " not measured ", "未经实测": " not measured ",
    "未实测": " not measured ",
    "没有实测": " not measured ", "实测": " measured ", "实际测量": " measured ", "测量": " measured ",
    "估算": " estimated ",
    "预估": " estimated ", "估计": " estimated ", "预计": " expected ", "预期": " expected ", "理论": " theoretical ",
    "预测": " predicted ", "推算": " extrapolated ", "外推": " extrapolated ", "模拟": " simulated ",
    "仿真": " simulated ",
    "摘自": " taken from ", "引自": " taken from ", "取自": " taken from ", "来自": " taken from ",
    "引用": " quoted from ",
    "论文": " their paper ", "发散": " diverged ", "崩溃": " crashed ", "失败": " failed ", "中断": " aborted ",
    "预热": " warm-up ", "编译": " compilation ", "不包括": " excluding ", "不包含": " excluding ",
    "不含": " excluding ",
    "包括": " including ", "包含": " including ", "含": " including ", "数据加载": " data loading ",
    "端到端": " end-to-end ",
    "仅前向": " forward only ", "前向": " forward ", "反向": " backward ", "使用": " used ", "条序列": " sequences ",
    "性能分析": " profiler ", "个": " ", "张": " ", "块": " ", "台": " ", "为": " is ", "和": " and ", "与": " and ",
    "数据": " data ", "样本": "samples", "图片": "images", "图像": "images", "秒": "s", "张/": "images/",
    "设为": " is ", "设": " ",
    "速度": " speed ", "提升": " ", "下": " ", "上游": " upstream ", "分支": " branch ", "词元": "tokens",
    "小时": " hours",
    "分钟": " minutes",
    "目标": " goal ", "规划": " planned ", "计划": " planned ", "未复现": " not re-run ", "未在": " not ",
    "复现": " rerun ",
    "的": " ", "数": "",
}  # fmt: skip
_GERMAN = {
    r"(?:batch|stapel)-?größen?": "batch size", r"globale[rnms]?": "global",
    r"(?:sequenz|kontext)länge": "sequence length",
    r"(?:grafik)?karten?": "gpus", r"knoten": "nodes", r"rechnern?": "machines", r"(?:gesamt)?durchsatz": "throughput",
    r"beschleunigung|beschleunigungsfaktor": "speedup", r"(?:skalierungs)?effizienz": "efficiency",
    r"schrittzeit|zeit (?:pro|je) schritt": "step time", r"trainings(?:zeit|dauer)|laufzeit|dauer": "training time",
    r"validierungs-?verlust(?:e|s)?|validierungs-?loss": "val loss", r"trainings-?verlust(?:e|s)?": "train loss",
    r"verlust(?:e|s)?": "loss", r"perplexität": "perplexity", r"genauigkeit": "accuracy", r"datentyp": "data type",
    r"modelle?s?": "model", r"verfahren|methoden?|varianten?": "method", r"strategie": "strategy",
    r"konfiguration": "configuration", r"anzahl(?: der)? gpus|gpu-?anzahl": "gpus", r"je|pro": "per",
    r"referenz(?:lauf)?|vergleichslauf|basis(?:linie)?": "baseline", r"ausgangs\w+": "baseline",
    r"unsere?[rsmn]?": "our", r"ursprüngliche[rsmn]?": "original", r"während|wogegen": "while",
    r"gegen(?:über)?": "against",
    r"statt|anstelle von|anstatt": "instead of", r"beide[nr]?": "both", r"alle[nr]?": "all", r"und": "and",
    r"aber": "but",
    r"(?:die )?(?:übrigen|restlichen|anderen)(?: zeilen)?": "the others", r"ersten? zeile": "first row",
    r"zweiten? zeile": "second row", r"letzten? zeile": "last row",
    r"(?:nicht|keine) gemessen|keine messung(?:en)?|ungemessen":
    "not measured", r"geschätzt\w*|schätzung(?:en)?": "estimated",
    r"hochrechnung(?:en)?|hochgerechnet\w*": "extrapolated",
    r"erwartet\w*|erwartung(?:en)?|voraussichtlich\w*": "expected", r"prognosen?|prognostiziert\w*": "projected",
    r"simuliert\w*|simulation(?:en)?": "simulated", r"(?:be|er)rechnet\w*": "calculated",
    r"gemessen\w*|messung(?:en)?": "measured",
    r"übernommen aus|zitiert(?: aus| nach)?|entnommen(?: aus)?|stammt aus|stammen aus": "taken from",
    r"abgebrochen|abgestürzt": "crashed", r"divergiert\w*": "diverged", r"aufwärm\w*": "warm-up",
    r"einschließlich|inklusive|inkl\.?": "including", r"ohne": "without",
    r"kompilier(?:en|ung)|übersetzung": "compilation",
    r"(?:nur|lediglich) vorwärts\w*": "forward only", r"sequenzen": "sequences", r"beispielen?": "samples",
    r"bildern?": "images",
    r"eine[rmns]?": "one", r"zwei": "two", r"drei": "three", r"vier": "four", r"acht": "eight", r"sechzehn": "sixteen",
    r"zweiunddreißig": "thirty-two", r"mit": "with", r"auf": "on", r"bei": "at", r"schritten?": "steps",
    r"(?:die |das |der )?neue[rsn]?": "new", r"ende(?:te|t)(?: bei)?|erreicht\w*": "ended at", r"tabelle": "table",
    r"gesamt": "total", r"schritt": "step", r"(?:proben|beispiele)(?=/)": "samples", r"bilder(?=/)": "images",
    r"sequenz(?=/)": "sequence",
    r"zeit": "time", r"epoche": "epoch", r"faktor": "factor", r"parallele": "parallel", r"starke": "strong",
    r"schwache": "weak",
    r"skalierung": "scaling", r"beträgt|betrug|betragen|war|waren|ist|sind|lag|lagen": "is", r"nur": "only",
    r"letzte[rns]? (?:wert|zahl|eintrag)": "last row",
    r"(?:die |der |den )?untere[rn]?(?: zeile| wert| zahl)?": "last row",
    r"(?:die |der |den )?(?:beiden |zwei )oberen(?: zeilen| werte)?": "first two rows",
    r"(?:die |der |den )?obere[rn]?(?: zeile| wert| zahl)?": "first row",
    r"(?:die|der|das) erste(?= noch| stammt| lief| wurde| ist| mit| auf)": "first row",
    r"(?:die|der|das) (?:zweite|letzte)(?= noch| stammt| lief| wurde| ist| mit| auf)": "last row",
    r"(?:vom|aus dem|von einem) alten": "of an old",
    r"stand": "stood", r"verwendet\w*|nutzt\w*|benutzt\w*": "used", r"geplant\w*": "planned",
    r"ziel(?:wert)?": "goal", r"wert": "value",
    r"zahlen": "numbers", r"werte": "values", r"diese[rsn]?": "these", r"noch nicht": "not yet", r"nicht": "not",
    r"wurden?": "were",
}  # fmt: skip
_OF_CHINESE = re.compile("|".join(map(re.escape, sorted(_CHINESE, key=len, reverse=True))))
_IS_CHINESE = re.compile("[\u3000-\u9fff\uff00-\uffef]")
_OF_GERMAN = re.compile(rf"(?i)\b(?:{'|'.join(f'({each})' for each in _GERMAN)})\b")
_IS_GERMAN = re.compile(
    r"(?i)\b(?:und|mit|bilder|proben|sequenzen|faktor|zeile|nur|nicht|wurden?|ist|der|die|das|auf|bei|je|größe"
    r"|durchsatz|beschleunigung|genauigkeit|hochrechnung|messung|schätzung"
    r"|prognose|laufzeit|knoten|zeit|verfahren|\w*verlust|\w*effizienz|\w*zeit|\w*größe|\w*länge|referenz|hochgerechnet"
    r"|geschätzt|erwartet|karten|gesamt|pro (?:gpu|karte|schritt))\b"
)
_ENGLISH = tuple(_GERMAN.values())
_CARDS = re.compile(r"(?<=[\d一二两三四八]) ?(?:[张块台] ?)?(?:GPU ?)?卡|(?<=[单双])卡")
_NODES = re.compile(r"(?<=[\d一二两三四八单双]) ?台?机(?!器)")
_DIGITS = {"一": "1", "单": "1", "二": "2", "两": "2", "双": "2", "三": "3", "四": "4", "八": "8"}


def english(text: str) -> str:
    """Return a text with the German and Chinese words of measurements in English; other words stay."""
    if _IS_CHINESE.search(text):
        text = re.sub(r"(?<=[\u4e00-\u9fff\d]),(?=[\u4e00-\u9fffA-Za-z])|(?<=[\u4e00-\u9fff]),", ", ", text)
        text = re.sub(r"(?<=[\u4e00-\u9fff\d]);(?=\S)", "; ", text)
        text = re.sub(r"[单每]卡(吞吐[量率]?)", r"\1 per gpu ", re.sub("单卡(?=批|batch)", "每卡", text))
        text = re.sub("十六(?=[张块台]?[卡机])", "16", text)
        text = _NODES.sub(" nodes, ", _CARDS.sub(" gpus ", text))
        text = re.sub(r"[一单二两双三四八](?= (?:gpus|nodes))", lambda found: _DIGITS[found[0]], text)
        text = _OF_CHINESE.sub(lambda found: _CHINESE[found[0]], text)
        text = re.sub(r"(?<=[\u4e00-\u9fff])(?=[A-Za-z\d])|(?<=[A-Za-z\d%])(?=[\u4e00-\u9fff])", " ", text)
        text = re.sub(r" {2,}", " ", text).strip()
    if _IS_GERMAN.search(text):
        text = re.sub(r"(?<![\d.,])(\d{1,3}),(\d{1,2})(?![\d,])", r"\1.\2", text)
        text = _OF_GERMAN.sub(lambda found: _ENGLISH[(found.lastindex or 1) - 1], text)
    return text
